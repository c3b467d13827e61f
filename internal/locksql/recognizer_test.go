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
	if n := testing.AllocsPerRun(100, func() { r.parse("SELECT pg_advisory_lock(42)", true) }); n > 5 {
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
	if r.Parse(text, true) != r.Parse(text, true) {
		t.Error("8 KB are not cached")
	}
	if text += "x"; r.Parse(text, true) == r.Parse(text, true) {
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

// TestCacheIsBounded: whatever comes, about maxCache bytes are held, and what is asked for again and again stays.
func TestCacheIsBounded(t *testing.T) {
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	for name, text := range map[string]func(i int) string{
		"short": func(i int) string { return fmt.Sprintf("SELECT pg_advisory_lock(%d)", i) },
		"long": func(i int) string {
			return fmt.Sprintf("SELECT pg_advisory_lock(%d) -- %s", i, strings.Repeat("x", 8000))
		},
		"calls": func(i int) string {
			return fmt.Sprintf("SELECT pg_advisory_lock(%d)%s", i, strings.Repeat(", pg_advisory_lock(hashtext($1))", 200))
		},
		"sum": func(i int) string {
			return fmt.Sprintf("SELECT pg_advisory_lock(%d%s)", i, strings.Repeat("+$1", 2000))
		},
		"steps": func(i int) string { return fmt.Sprintf("SELECT 'advisory %d'; %s", i, strings.Repeat("end;", 1900)) },
	} {
		r := New(nil)
		before := heap()
		often := r.Parse("SELECT pg_advisory_lock(-1)", true)
		texts := 1000
		if name == "short" {
			texts = 5000
		}
		for i := range texts {
			r.Parse(text(i), true)
			if again := r.Parse("SELECT pg_advisory_lock(-1)", true); again != often {
				t.Fatalf("%s: dropped after %d texts although in use", name, i)
			}
		}
		if grown := int64(heap() - before); grown > 3*maxCache/2 {
			t.Errorf("%s: %d bytes are held", name, grown)
		}
		if first := text(0); r.cache.young[cacheKey{first, true}] != nil || r.cache.old[cacheKey{first, true}] != nil {
			t.Errorf("%s: the first of %d is still there", name, texts)
		}
		runtime.KeepAlive(r)
	}
}
