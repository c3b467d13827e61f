package locksql

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
	"unsafe"
)

func TestCacheHitAllocatesNothing(t *testing.T) {
	r := New(nil)
	for _, text := range []string{"SELECT pg_advisory_lock($1)", "SELECT id FROM t WHERE pg_try_advisory_lock(7, id)", "SELECT 'advisory'"} {
		want := r.Parse(text, true)
		if n := testing.AllocsPerRun(100, func() {
			if r.Parse(text, true) != want {
				t.Error("not the same")
			}
		}); n != 0 {
			t.Errorf("%s: %v allocations", text, n)
		}
	}
}

func TestPlainParseAllocatesLittle(t *testing.T) {
	r := New(nil)
	for text, bound := range map[string]float64{"SELECT pg_advisory_lock(42)": 3, "SELECT pg_advisory_lock($1)": 3} {
		if n := testing.AllocsPerRun(100, func() { r.parse(text, true) }); n > bound {
			t.Errorf("%s: %v allocations", text, n)
		}
	}
}

// Of an argument that is only shown, no more is copied than is shown.
func TestLongOpaqueArgumentAllocatesLittle(t *testing.T) {
	r := New(nil)
	text := "SELECT 1, pg_advisory_lock(a" + strings.Repeat("+a", 100_000) + ")"
	if n := testing.AllocsPerRun(10, func() { r.parse(text, true) }); n > 25 {
		t.Error(n)
	}
}

func TestWithoutMentionAndStepNothingIsAllocated(t *testing.T) {
	r := New([]string{"take_lock"})
	text := ormText(2000)
	if n := testing.AllocsPerRun(100, func() { r.Parse(text, true) }); n != 0 {
		t.Error(n)
	}
	if len(r.cache.young) != 0 {
		t.Error("cached")
	}
}

func TestCacheKeepsTheSettingsApart(t *testing.T) {
	r := New(nil)
	text := `SELECT '\'', pg_advisory_lock(1) --'`
	for range 2 {
		if r.Parse(text, true).Form != NoCall || r.Parse(text, false).Form != Opaque {
			t.Fatal("mixed up")
		}
	}
}

func TestCacheLeavesLongTexts(t *testing.T) {
	r := New(nil)
	text := "SELECT pg_advisory_lock(1) --"
	text += strings.Repeat("x", maxCached-len(text))
	first := r.Parse(text, true)
	if r.Parse(text, true) != first {
		t.Error("8 KB are not cached")
	}
	text += "x"
	if first = r.Parse(text, true); r.Parse(text, true) == first {
		t.Error("more than 8 KB are cached")
	}
}

// TestCacheDoesNotPinTheText: the text may be a small part of something large.
func TestCacheDoesNotPinTheText(t *testing.T) {
	r := New(nil)
	large := "SELECT pg_advisory_lock($1::int8, 'x')" + strings.Repeat(" ", 100)
	r.Parse(large[:38], true)
	inside := func(s string) bool {
		p, q := uintptr(unsafe.Pointer(unsafe.StringData(s))), uintptr(unsafe.Pointer(unsafe.StringData(large)))
		return p >= q && p < q+uintptr(len(large))
	}
	for key, st := range r.cache.young {
		if inside(key.text) || inside(st.Calls[0].Args[0].Expr) {
			t.Error("a part of the text is kept")
		}
	}
}

func heapInUse() int {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // what pools and finalizers held until the first
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

// manyTexts are series of different texts whose analyses are large in different ways.
var manyTexts = map[string]func(i int) string{
	"short": func(i int) string { return fmt.Sprintf("SELECT pg_advisory_lock(%d)", i) },
	"long": func(i int) string {
		return fmt.Sprintf("SELECT pg_advisory_lock(%d) -- %s", i, strings.Repeat("x", 8000))
	},
	"calls": func(i int) string {
		return fmt.Sprintf("SELECT pg_advisory_lock(%d)%s", i, strings.Repeat(", pg_advisory_unlock_all()", 200))
	},
	"args": func(i int) string {
		return fmt.Sprintf("SELECT pg_advisory_lock(%d)%s", i, strings.Repeat(", pg_advisory_lock(1, 2)", 200))
	},
	"sum": func(i int) string {
		return fmt.Sprintf("SELECT pg_advisory_lock(%d%s)", i, strings.Repeat("+$1", 2000))
	},
	"literals": func(i int) string {
		return fmt.Sprintf("SELECT pg_advisory_lock(hashtext('%d%s'))", i, strings.Repeat("x", 7000))
	},
	"params": func(i int) string {
		return fmt.Sprintf("SELECT pg_advisory_lock(%d)%s", i, strings.Repeat(", pg_advisory_lock(($1), ($2))", 200))
	},
	"steps": func(i int) string { return fmt.Sprintf("SELECT 'advisory %d'; %s", i, strings.Repeat("end;", 1900)) },
}

// TestFootprint: what an entry is said to hold is near to what it holds, else the cache could not bound it.
func TestFootprint(t *testing.T) {
	r := New(nil)
	for name, text := range manyTexts {
		n := 200
		if name == "short" {
			n = 5000
		}
		kept := make([]*Statement, n)
		keys := make([]cacheKey, n)
		said := 0
		before := heapInUse()
		for i := range n {
			keys[i] = cacheKey{text: text(i)}
			kept[i] = r.parse(keys[i].text, true)
			said += footprint(keys[i], kept[i])
		}
		holds := heapInUse() - before
		runtime.KeepAlive(kept)
		runtime.KeepAlive(keys)
		if holds > said*5/4 || said > holds*2 {
			t.Errorf("%s: %d bytes are taken for %d", name, holds/n, said/n)
		}
	}
}

func TestCacheKeepsMany(t *testing.T) {
	r := New(nil)
	var first []*Statement
	for i := range 500 {
		first = append(first, r.Parse(manyTexts["short"](i), true))
	}
	for i, st := range first {
		if r.Parse(manyTexts["short"](i), true) != st {
			t.Fatal("dropped", i)
		}
	}
}

// TestCacheIsBounded: whatever comes, about maxCache bytes are held, and what is asked for again and again stays.
func TestCacheIsBounded(t *testing.T) {
	for name, text := range manyTexts {
		texts := 300
		if name == "short" {
			texts = 5000
		}
		r := New(nil)
		before := heapInUse()
		often := r.Parse("SELECT pg_advisory_lock(-1)", true)
		for i := range texts {
			r.Parse(text(i), true)
			if again := r.Parse("SELECT pg_advisory_lock(-1)", true); again != often {
				t.Fatalf("%s: dropped after %d texts although in use", name, i)
			}
		}
		if grown := heapInUse() - before; grown > 3*maxCache/2 {
			t.Errorf("%s: %d bytes are held", name, grown)
		}
		if first := text(0); r.cache.young[cacheKey{first, true}] != nil || r.cache.old[cacheKey{first, true}] != nil {
			t.Errorf("%s: the first of %d is still there", name, texts)
		}
		runtime.KeepAlive(r)
	}
}
