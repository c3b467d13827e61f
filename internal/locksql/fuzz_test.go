package locksql

import (
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// seeds is a corpus that touches each rule of the lexer.
var seeds = []string{
	"", "SELECT pg_advisory_lock(1)", "select pg_catalog.\"pg_advisory_lock\"(-$1::int, hashtext('a')) as x;",
	"SELECT E'\\'' 'a'\n--b\n'c' U&'\\0061' UESCAPE '!' $$x$$ $a$ $b$ $a$ B'01' X'1F' N'x' $1 $a a$b$c \"x\"\"y\" u&\"x\"",
	"/* /* */ pg_advisory_lock(1) */ -- x\n 1..2 1e5 .5 0x1F 1_000 0b1 0o7 1e+ @-+ =- <> != >= :: := => ~!@#^&|`?%",
	"DO $$ BEGIN EXECUTE 'SELECT ''x'', pg_advisory_xact_lock(1)'; END $$", "EXPLAIN (ANALYZE off) SELECT pg_advisory_lock(1)",
	"CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT pg_advisory_lock(1); END; SELECT pg_advisory_lock(2)",
	"PREPARE p AS SELECT pg_advisory_lock(1); EXECUTE p; DEALLOCATE ALL; DISCARD ALL; SET TRANSACTION ISOLATION LEVEL SERIALIZABLE",
	"SELECT 'pg_advisory_lock(1)", "SELECT pg_advisory_lock(1) /*", "SELECT pg_advisory_lock(((((1)))))", "\x00\xff\x80pg_advisory_lock(1)",
	"SELECT id FROM (t JOIN u ON pg_try_advisory_lock(id)), LATERAL (SELECT 1) x WHERE EXISTS (SELECT FROM v)",
	"+-+-+/*a*/--b\n*", "SELECT $1$a$1$a$ 1a 0x 1_ 1__0 1.e5 1.5.5 \\' {}",
}

// FuzzLexer: the lexer loses no byte and makes none up; the analysis does not panic, gives calls that are in the text,
// and does not depend on letter case outside quotes.
func FuzzLexer(f *testing.F) {
	for _, s := range seeds {
		f.Add(s, true)
		f.Add(s, false)
	}
	r := New([]string{"take_lock"})
	f.Fuzz(func(t *testing.T, text string, standardConformingStrings bool) {
		l := lexer{src: text, escapes: !standardConformingStrings}
		var upper strings.Builder
		pos := 0
		for {
			tok := l.next()
			if tok.start < pos || tok.end < tok.start || tok.end > len(text) || tok.end == tok.start && tok.kind != tEOF && tok.kind != tUnterminated {
				t.Fatalf("%q: token %d at %d..%d after %d", text, tok.kind, tok.start, tok.end, pos)
			}
			upper.WriteString(text[pos:tok.start])
			if tok.kind == tIdent || tok.kind == tNumber {
				upper.WriteString(upperASCII(l.text(tok)))
			} else {
				upper.WriteString(l.text(tok))
			}
			pos = tok.end
			switch tok.kind {
			case tString, tQuoted:
				if s, ok := l.unquote(tok); ok && len(s) > tok.end-tok.start {
					t.Fatalf("%q: %q is longer than written", text, s)
				}
			case tEOF, tUnterminated:
				if pos != len(text) {
					t.Fatalf("%q: ends at %d", text, pos)
				}
			}
			if tok.kind == tEOF || tok.kind == tUnterminated {
				break
			}
		}

		st := r.Parse(text, standardConformingStrings)
		for i, c := range st.Calls {
			if c.Start < 0 || c.End > len(text) || c.Start >= c.End {
				t.Fatalf("%q: call at %d..%d", text, c.Start, c.End)
			}
			for _, d := range st.Calls[:i] {
				disjoint, inside, same := d.End <= c.Start, c.End <= d.End, c.Start == d.Start && c.End == d.End
				if d.Start > c.Start || !disjoint && !inside && !same || st.Form == Plain && !disjoint {
					t.Fatalf("%q: calls at %d..%d and %d..%d", text, d.Start, d.End, c.Start, c.End)
				}
			}
			k := c.Key(testArg)
			if k.String() != c.Key(testArg).String() || len(k.Expr) > 2*(maxExpr+len("…"))+2 {
				t.Fatalf("%q: %#v", text, k)
			}
			if utf8.ValidString(text) && !utf8.ValidString(k.Expr) {
				t.Fatalf("%q: %q is not UTF-8", text, k.Expr)
			}
		}
		if st.Form == NoCall && (len(st.Calls) > 0 || st.Session || st.Deferred || st.PerRow) || st.Form != NoCall && !r.Mentions(text) {
			t.Fatalf("%q: %+v", text, st)
		}
		// A body of DO is a quoted text to the lexer here, and code to the server: the comparison leaves it out.
		if a, b := describe(st), describe(r.Parse(upper.String(), standardConformingStrings)); a != b {
			t.Fatalf("%q: %s\nin upper case: %s", text, a, b)
		}
	})
}

func upperASCII(s string) string {
	b := []byte(s)
	for i, c := range b {
		if 'a' <= c && c <= 'z' {
			b[i] -= 0x20
		}
	}
	return string(b)
}

// FuzzMentions: the prefilter equals the naive search.
func FuzzMentions(f *testing.F) {
	for _, s := range seeds {
		f.Add(s, "take_lock")
	}
	f.Add("aDvIsOrY", "x")
	f.Add(strings.Repeat("v", 64)+"advisor", "advisory")
	f.Add(strings.Repeat("w", 31)+"advisoryv", "a")
	f.Add("@dvisory advisor\x99 advisor\x19", "é_1")
	f.Fuzz(func(t *testing.T, text, name string) {
		if got, want := New(nil).Mentions(text), strings.Contains(lower(text), "advisory"); got != want {
			t.Fatalf("%q: %v, want %v", text, got, want)
		}
		if name = lower(name); name != "" && len(name) <= nameLen {
			n := newNeedle(name)
			if got, want := n.in(text), strings.Contains(lower(text), name); got != want {
				t.Fatalf("%q in %q: %v, want %v", name, text, got, want)
			}
		}
	})
}

// TestMentionsAtEveryOffset: the word is found wherever the loops over 32, 8 and 1 bytes meet.
func TestMentionsAtEveryOffset(t *testing.T) {
	r := New([]string{"f"})
	for n := range 100 {
		for _, filler := range []string{"x", "v", "V", "w", "\xff"} {
			pad := strings.Repeat(filler, n)
			for _, tail := range []string{"", "v", pad} {
				if !New(nil).Mentions(pad + "AdvisorY" + tail) {
					t.Fatalf("%d × %q, tail %q", n, filler, tail)
				}
				if New(nil).Mentions(pad + "advisor" + tail) {
					t.Fatalf("%d × %q, tail %q: found", n, filler, tail)
				}
				if !r.Mentions(pad+"F"+tail) || r.Mentions(pad+tail) {
					t.Fatalf("%d × %q, tail %q: one byte", n, filler, tail)
				}
			}
		}
	}
}

// TestMentionsOfAnyName: names may have bytes that are no letters.
func TestMentionsOfAnyName(t *testing.T) {
	for _, name := range []string{"sperre_ö", "{", "~x", "f1", "1", "é", "\x80", "@", "`"} {
		n := newNeedle(name)
		if !n.in("SELECT " + upperASCII(name) + "(1) FROM t") {
			t.Errorf("%q is not found", name)
		}
		for _, other := range []string{"[", "^X", "sperre_ä", "SELECT g2(3)", "\x00", "\xa0", " "} {
			if n.in(other) {
				t.Errorf("%q in %q", name, other)
			}
		}
	}
	if n := newNeedle("advisory"); n.word[n.at] != 'v' {
		t.Errorf("looks for %c, which is not the rarest", n.word[n.at])
	}
}

func TestMentionsAllocatesNothing(t *testing.T) {
	r := New([]string{"take_lock"})
	text := ormText(5000)
	if n := testing.AllocsPerRun(100, func() { r.Mentions(text) }); n != 0 {
		t.Error(n)
	}
}

// hostile are texts, n times something, on which a careless parser recurses or goes back and forth.
var hostile = map[string]func(n int) string{
	"comments": func(n int) string {
		return "SELECT pg_advisory_lock(1)" + strings.Repeat("/*", n) + strings.Repeat("*/", n)
	},
	"open comments": func(n int) string { return "SELECT pg_advisory_lock(1)" + strings.Repeat("/*", n) },
	"parentheses": func(n int) string {
		return "SELECT pg_advisory_lock(" + strings.Repeat("(", n) + "1" + strings.Repeat(")", n) + ")"
	},
	"open": func(n int) string { return "SELECT pg_advisory_lock(1)" + strings.Repeat("(", n) },
	"subqueries": func(n int) string {
		return strings.Repeat("(SELECT pg_advisory_xact_lock(1) FROM t ", n) + strings.Repeat(")", n)
	},
	"calls in calls": func(n int) string {
		return "SELECT " + strings.Repeat("pg_advisory_lock(", n) + "1" + strings.Repeat(")", n)
	},
	"casts in casts": func(n int) string {
		return "SELECT pg_advisory_lock(" + strings.Repeat("cast(", n) + "1" + strings.Repeat(" as int)", n) + ")"
	},
	"hashes": func(n int) string {
		return "SELECT pg_advisory_lock(" + strings.Repeat("hashtext(", n) + "1" + strings.Repeat(")", n) + ")"
	},
	"casts": func(n int) string { return "SELECT pg_advisory_lock(1" + strings.Repeat("::int8", n) + ")" },
	"sum":   func(n int) string { return "SELECT pg_advisory_lock($1" + strings.Repeat("+$2", n) + ")" },
	"params": func(n int) string {
		b := []byte("SELECT pg_advisory_lock(0")
		for i := range n {
			b = strconv.AppendInt(append(b, "+$"...), int64(i%65535+1), 10)
		}
		return string(append(b, ')'))
	},
	"signs":          func(n int) string { return "SELECT pg_advisory_lock(" + strings.Repeat("+", n) + "1)" },
	"minus":          func(n int) string { return "SELECT pg_advisory_lock(" + strings.Repeat("- ", n) + "1)" },
	"sign pairs":     func(n int) string { return "SELECT advisory " + strings.Repeat("+-", n) + "1" },
	"operator":       func(n int) string { return "SELECT advisory " + strings.Repeat("=+", n) + "1" },
	"plain calls":    func(n int) string { return "SELECT pg_advisory_lock(1)" + strings.Repeat(", pg_advisory_lock(1)", n) },
	"semicolons":     func(n int) string { return "SELECT pg_advisory_lock(1)" + strings.Repeat(";", n) },
	"statements":     func(n int) string { return strings.Repeat("SELECT pg_advisory_lock(1);", n) },
	"steps":          func(n int) string { return strings.Repeat("COMMIT;", n) + "SELECT 'advisory'" },
	"dotted":         func(n int) string { return "SELECT pg_advisory_lock" + strings.Repeat(".pg_advisory_lock", n) + "(1)" },
	"doubled quotes": func(n int) string { return "SELECT pg_advisory_lock('" + strings.Repeat("''", n) + "')" },
	"continued":      func(n int) string { return "SELECT pg_advisory_lock(''" + strings.Repeat("\n''", n) + ")" },
	"not continued":  func(n int) string { return "SELECT pg_advisory_lock(" + strings.Repeat("'' \n -- x\n ,", n) + "1)" },
	"uescape":        func(n int) string { return "SELECT advisory " + strings.Repeat("U&'a' uescape ", n) },
	"dollars":        func(n int) string { return "SELECT pg_advisory_lock(1)" + strings.Repeat("$a", n) },
	"dollar tags":    func(n int) string { return "SELECT pg_advisory_lock(1)" + strings.Repeat(" $a $a$ $a $a$", n) },
	"long tag": func(n int) string {
		t := "$" + strings.Repeat("a", n) + "$"
		return "SELECT advisory " + t + strings.Repeat("$a", n) + t
	},
	"do in do": func(n int) string {
		return "DO $$" + strings.Repeat("EXECUTE 'DO ''pg_advisory_lock(1)'''; ", n) + "$$"
	},
	"do escapes": func(n int) string { return "DO '" + strings.Repeat("PERFORM pg_advisory_lock(''a''); ", n) + "'" },
	"atomic": func(n int) string {
		return "CREATE FUNCTION f() BEGIN ATOMIC " + strings.Repeat("SELECT pg_advisory_lock(1);", n)
	},
	"unions": func(n int) string {
		return "SELECT pg_advisory_lock(1) FROM t" + strings.Repeat(" UNION SELECT 1 FROM t, (u)", n)
	},
	"explain": func(n int) string {
		return "EXPLAIN (" + strings.Repeat("ANALYZE off,", n) + "ANALYZE) SELECT pg_advisory_lock(1)"
	},
	"explains": func(n int) string { return strings.Repeat("EXPLAIN ", n) + "SELECT pg_advisory_lock(1)" },
	"creates": func(n int) string {
		return "CREATE " + strings.Repeat("OR REPLACE ", n) + "VIEW v AS SELECT pg_advisory_lock(1)"
	},
	"quoted name": func(n int) string { return `SELECT pg_advisory_lock(1), "` + strings.Repeat(`""`, n) + `"` },
	"digits":      func(n int) string { return "SELECT pg_advisory_lock(" + strings.Repeat("9", n) + ")" },
}

// TestHostileTexts: a million of anything is read, in linear time and bounded stack. The bound on time is loose, and yet
// far from what going back and forth would take.
func TestHostileTexts(t *testing.T) {
	n := 1_000_000
	if testing.Short() || raced {
		n = 50_000
	}
	r := New(nil)
	for name, text := range hostile {
		text := text(n)
		start := time.Now()
		st := r.Parse(text, true)
		if took := time.Since(start); took > 50*time.Millisecond+time.Duration(len(text))*10*time.Microsecond {
			t.Errorf("%s: %s for %d bytes", name, took, len(text))
		}
		if st.Form == NoCall && strings.HasPrefix(text, "SELECT pg_advisory_lock(1)") {
			t.Errorf("%s: %s", name, describe(st))
		}
	}
}

// raced is whether the race detector runs, which makes a text of megabytes take a
// minute; make test runs TestHostileTexts once more without it.
var raced bool

// BenchmarkHostile shows growth: the bytes a second of each text should not fall from one length to the next.
func BenchmarkHostile(b *testing.B) {
	r := New(nil)
	for name, text := range hostile {
		for _, n := range []int{1_000, 10_000, 100_000} {
			text := text(n)
			b.Run(strings.ReplaceAll(name, " ", "_")+"/"+strconv.Itoa(n), func(b *testing.B) {
				b.SetBytes(int64(len(text)))
				for b.Loop() {
					r.parse(text, true)
				}
			})
		}
	}
}
