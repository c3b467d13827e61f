package locksql

import (
	"fmt"
	"strings"
	"sync"
	"testing"
)

// describe is an analysis in one line: the form, the flags, each call with its key, the steps.
func describe(st *Statement) string {
	parts := []string{st.Form.String()}
	for _, flag := range []struct {
		set  bool
		name string
	}{{st.Session, "session"}, {st.Deferred, "deferred"}, {st.PerRow, "per row"}} {
		if flag.set {
			parts[0] += ", " + flag.name
		}
	}
	for _, c := range st.Calls {
		call := c.Func.String()
		if c.Func != UnlockAll {
			call += " " + c.Space.String() + " " + c.Key(testArg).String()
		}
		for _, a := range c.Args {
			if a.Weak {
				call += " weak"
			}
		}
		parts = append(parts, call)
	}
	for _, s := range st.Steps {
		step := s.Kind.String()
		if s.Name != "" {
			step += " " + s.Name
		}
		if s.Chain {
			step += " chain"
		}
		if s.Locks {
			step += " locks"
		}
		if s.Session {
			step += " session"
		}
		if s.Isolation != "" {
			step += " " + s.Isolation
		}
		parts = append(parts, step)
	}
	return strings.Join(parts, "; ")
}

// testArg gives the parameters of the tables below their values.
func testArg(n int) (any, bool) {
	switch n {
	case 1:
		return int64(7), true
	case 2:
		return "abc", true
	case 3:
		return nil, true
	case 5:
		return " -5 ", true
	case 6:
		return "0x1F", true
	case 7:
		return int64(-9223372036854775808), true
	case 8:
		return "3000000000", true
	case 9:
		return int64(-3), true
	}
	return nil, false
}

func TestFunc(t *testing.T) {
	for f, want := range map[Func][5]bool{ // session, share, try, release, blocking
		Lock: {true, false, false, false, true}, LockShared: {true, true, false, false, true},
		TryLock: {true, false, true, false, false}, TryLockShared: {true, true, true, false, false},
		XactLock: {false, false, false, false, true}, XactLockShared: {false, true, false, false, true},
		TryXactLock: {false, false, true, false, false}, TryXactLockShared: {false, true, true, false, false},
		Unlock: {true, false, false, true, false}, UnlockShared: {true, true, false, true, false}, UnlockAll: {true, false, false, true, false},
	} {
		if got := [5]bool{f.Session(), f.Share(), f.Try(), f.Release(), f.Blocking()}; got != want {
			t.Errorf("%s: %v, want %v", f, got, want)
		}
	}
}

const lock1 = "plain, session; pg_advisory_lock bigint 1"

func TestPlain(t *testing.T) {
	r := New(nil)
	for _, tt := range []struct{ text, want string }{
		// Each function.
		{"SELECT pg_advisory_lock(1)", lock1},
		{"SELECT pg_advisory_lock_shared(1)", "plain, session; pg_advisory_lock_shared bigint 1"},
		{"SELECT pg_try_advisory_lock(1)", "plain, session; pg_try_advisory_lock bigint 1"},
		{"SELECT pg_try_advisory_lock_shared(1)", "plain, session; pg_try_advisory_lock_shared bigint 1"},
		{"SELECT pg_advisory_xact_lock(1)", "plain; pg_advisory_xact_lock bigint 1"},
		{"SELECT pg_advisory_xact_lock_shared(1)", "plain; pg_advisory_xact_lock_shared bigint 1"},
		{"SELECT pg_try_advisory_xact_lock(1)", "plain; pg_try_advisory_xact_lock bigint 1"},
		{"SELECT pg_try_advisory_xact_lock_shared(1)", "plain; pg_try_advisory_xact_lock_shared bigint 1"},
		{"SELECT pg_advisory_unlock(1)", "plain, session; pg_advisory_unlock bigint 1"},
		{"SELECT pg_advisory_unlock_shared(1)", "plain, session; pg_advisory_unlock_shared bigint 1"},
		{"SELECT pg_advisory_unlock_all()", "plain, session; pg_advisory_unlock_all"},

		// Spelling.
		{"select PG_Advisory_Lock(1);", lock1},
		{"SELECT pg_advisory_lock(1) ; ;", lock1},
		{"/* a /* b */ c */ SELECT -- d\n\tpg_advisory_lock /**/ ( /**/ 1 -- e\n ) -- f", lock1},
		{"SELECT\vpg_advisory_lock(1)\f\r", lock1},
		{`SELECT "pg_advisory_lock" (1)`, lock1},
		{`SELECT U&"pg\005fadvisory!005flock" UESCAPE '!' (1)`, "no call"},
		{`SELECT U&"pg!005fadvisory!005flock" UESCAPE '!' (1)`, lock1},
		{`SELECT u&"pg\005fadvisory\+00005flock"(1)`, lock1},
		{`SELECT "PG_ADVISORY_LOCK"(1)`, "no call"},
		{`SELECT pg_catalog.pg_advisory_lock(1)`, lock1},
		{`SELECT PG_Catalog . "pg_advisory_lock" (1)`, lock1},
		{`SELECT "pg_catalog"/**/./**/pg_advisory_lock(1)`, lock1},

		// Result columns.
		{"SELECT pg_advisory_lock(1) AS got", lock1},
		{"SELECT pg_advisory_lock(1) got", lock1},
		{`SELECT pg_advisory_lock(1) AS "Got it"`, lock1},
		{`SELECT pg_advisory_lock(1) AS select`, lock1},
		{`SELECT pg_advisory_lock(1) U&"g\006Ft"`, lock1},
		{"SELECT pg_advisory_lock(1) a, pg_try_advisory_xact_lock(2, 3) AS b, pg_advisory_unlock_all()",
			"plain, session; pg_advisory_lock bigint 1; pg_try_advisory_xact_lock int,int (2, 3); pg_advisory_unlock_all"},
		{"SELECT pg_advisory_lock(1), pg_advisory_xact_lock(2)", "plain, session; pg_advisory_lock bigint 1; pg_advisory_xact_lock bigint 2"},
		{"SELECT pg_advisory_xact_lock(1), pg_advisory_xact_lock(2)", "plain; pg_advisory_xact_lock bigint 1; pg_advisory_xact_lock bigint 2"},
	} {
		if got := describe(r.Parse(tt.text, true)); got != tt.want {
			t.Errorf("%s\n got %s\nwant %s", tt.text, got, tt.want)
		}
	}
}

// Arguments, each as the key of a lock.
func TestArguments(t *testing.T) {
	r := New(nil)
	for _, tt := range []struct{ args, want string }{
		// Literals.
		{"42", "bigint 42"},
		{"-42", "bigint -42"},
		{"+42", "bigint 42"},
		{"- - 42", "bigint 42"},
		{"-(-(42))", "bigint 42"},
		{"((42))", "bigint 42"},
		{"-0", "bigint 0"},
		{"0042", "bigint 42"},
		{"1_000_000", "bigint 1000000"},
		{"0x1F", "bigint 31"},
		{"0X_1_f", "bigint 31"},
		{"0o17", "bigint 15"},
		{"0b101", "bigint 5"},
		{"-0x8000000000000000", "bigint -9223372036854775808"},
		{"9223372036854775807", "bigint 9223372036854775807"},
		{"-9223372036854775808", "bigint -9223372036854775808"},
		{"9223372036854775808", "bigint 9223372036854775808"}, // out of range: the expression, unknown
		{"99999999999999999999999", "bigint 99999999999999999999999"},
		{"'42'", "bigint 42"},
		{"' -42\t'", "bigint -42"},
		{"'+42'", "bigint 42"},
		{"'0x1f'", "bigint 31"},
		{"'1_0'", "bigint 10"},
		{"'4'\n'2'", "bigint 42"},
		{"'4' -- and\n -- then\n\n'2'", "bigint 42"},
		{"E'4\\062'", "bigint 42"},
		{"e'\\x34\\u0032'", "bigint 42"},
		{"$$42$$", "bigint 42"},
		{"$q$42$q$", "bigint 42"},
		{"U&'4\\0032'", "bigint 42"},
		{"U&'4!0032' uescape '!'", "bigint 42"},
		{"NULL", "bigint NULL"},
		{"null::bigint", "bigint NULL"},
		{"CAST(NULL AS text)::int8", "bigint NULL"},

		// Casts to integers.
		{"42::bigint", "bigint 42"},
		{"'42'::int8", "bigint 42"},
		{"'42' :: pg_catalog . int8", "bigint 42"},
		{`'42'::"int4"::int8`, "bigint 42"},
		{"CAST('42' AS integer)", "bigint 42"},
		{"cast ( cast(42 as smallint) as pg_catalog.int8 )", "bigint 42"},
		{"bigint '42'", "bigint 42"},
		{"int2 '42'", "bigint 42"},
		{"pg_catalog.int8 '42'", "bigint 42"},
		{"-42::int2", "bigint -42"},
		{"(-32768)::int2", "bigint -32768"},
		{"-32768::int2", "bigint -32768::int2"}, // the cast is first and fails
		{"40000::smallint", "bigint 40000::smallint"},
		{"'40000'::int2::int8", "bigint '…'::int2::int8"},
		{"3000000000::int", "bigint 3000000000::int"},
		{"'x'::int8", "bigint '…'::int8"},
		{"'4 2'", "bigint '…'"},
		{"''", "bigint '…'"},
		{"'--1'", "bigint '…'"},
		{"'_1'", "bigint '…'"},
		{"'1_'", "bigint '…'"},
		{"'0x'", "bigint '…'"},

		// Parameters.
		{"$1", "bigint 7"},
		{"(($1))", "bigint 7"},
		{"$1::int::bigint", "bigint 7"},
		{"CAST($1 AS int4)", "bigint 7"},
		{"$2", "bigint $2"},
		{"$3", "bigint NULL"},
		{"$3::int", "bigint NULL"},
		{"$4", "bigint $4"},
		{"$5", "bigint -5"},
		{"$6", "bigint 31"},
		{"$7", "bigint -9223372036854775808"},
		{"$8", "bigint 3000000000"},
		{"$9", "bigint -3"},
		{"$9::int2::int8", "bigint -3"},
		{"$8::int4::int8", "bigint $8::int4::int8"},
		{"$8::int8::int4", "bigint $8::int8::int4"},
		{"$8::int4", "bigint $8::int4"},

		// Pairs.
		{"1, 9527", "int,int (1, 9527)"},
		{"$1, -2147483648", "int,int (7, -2147483648)"},
		{"1, 2147483648", "int,int (1, 2147483648)"},
		{"$8, 1", "int,int ($8, 1)"},
		{"$7, 1", "int,int ($7, 1)"},
		{"1, $3", "int,int NULL"},
		{"NULL, $4", "int,int NULL"},
		{"1, $4", "int,int (1, $4)"},
		{"$1, hashtext($2)", "int,int (7, hashtext($2)) weak"},
		{"$4, hashtext($2)", "int,int ($4, hashtext($2)) weak"},

		// Expressions.
		{"hashtext($2)", "bigint hashtext($2) weak"},
		{"HASHTEXT ( $2 )::bigint", "bigint hashtext($2)::bigint weak"},
		{"pg_catalog.hashtext('secret')", "bigint hashtext('…') weak"},
		{"hashtextextended($2, 0)", "bigint hashtextextended($2, 0)"},
		{`pg_catalog."hashtextextended"($2||'x',0)`, `bigint "hashtextextended"($2 || '…', 0)`},
		{"hashtext($2::text)", "bigint hashtext($2::text) weak"},
		{"hashtext($3)", "bigint hashtext($3) weak"},
		{"hashtext(NULL)", "bigint hashtext(null) weak"},
		{"-$1", "bigint -$1"},
		{"+$1", "bigint +$1"},
		{"~1", "bigint ~1"},
		{"1+2", "bigint 1 + 2"},
		{"1 - -2", "bigint 1 - -2"},
		{"($1 << 32) | $1", "bigint ($1 << 32) | $1"},
		{"1.5::int8", "bigint 1.5::int8"},
		{"1e3::int8", "bigint 1e3::int8"},
		{".5::int8", "bigint .5::int8"},
		{"x'1F'::int8", "bigint '…'::int8"},
		{"'t'::regclass::oid::int8", "bigint '…'::regclass::oid::int8"},
		{"'t'::public.int8", "bigint '…'::public.int8"},
		{"date '2024-01-01' - date '2000-01-01'", "bigint date '…' - date '…'"},
		{"'1'::numeric(10,2)::int8", "bigint '…'::numeric(10, 2)::int8"},
		{"'1'::double precision::int8", "bigint '…'::double precision::int8"},
		{"'1'::character varying(3)::int8", "bigint '…'::character varying(3)::int8"},
		{"('{\"a\":1}'::jsonb -> 'a')::int8", "bigint ('…'::jsonb -> '…')::int8"},
		{`"hashtext"($2)`, `bigint "hashtext"($2) weak`},
		{"'x'::hashtext::int8", "bigint '…'::hashtext::int8"},
		{"'x'::pg_catalog::int8", "bigint '…'::pg_catalog::int8"},
		{"(-$1)", "bigint (-$1)"},
		{"hashtextextended($2,-1)", "bigint hashtextextended($2, -1)"},
		{"1+(2)", "bigint 1 + (2)"},
		{"0X1F*1E3", "bigint 0x1f * 1e3"},
		{"'42'::public.int8", "bigint '…'::public.int8"},
		{`'42'::"bigint"`, `bigint '…'::"bigint"`},
		{`'42'::"integer"`, `bigint '…'::"integer"`},
		{`'42'::"int"`, `bigint '…'::"int"`},
		{`'42'::"smallint"`, `bigint '…'::"smallint"`},
		{"'42'::pg_catalog.bigint", "bigint '…'::bigint"},
		{"B'1'::bit varying(3)::text::int8", "bigint '…'::bit varying(3)::text::int8"},
		{"'1'::double::character::bit::int8", "bigint '…'::double::character::bit::int8"},
		{"/* a */ hashtext( -- b\n 'c' )", "bigint hashtext('…') weak"},
	} {
		text := "SELECT pg_advisory_lock(" + tt.args + ")"
		if got, want := describe(r.Parse(text, true)), "plain, session; pg_advisory_lock "+tt.want; got != want {
			t.Errorf("%s\n got %s\nwant %s", text, got, want)
		}
	}
}

// A key is a number, or an expression with values; never a guess.
func TestKeyKind(t *testing.T) {
	r := New(nil)
	for _, tt := range []struct {
		args string
		want KeyKind
	}{
		{"1", KeyNumber}, {"'1'", KeyNumber}, {"$1", KeyNumber}, {"1, 2", KeyNumber}, {"$5::int2", KeyNumber},
		{"hashtext($2)", KeyExpression}, {"$1 + 1", KeyExpression}, {"$1 * 2", KeyExpression}, {"$1 / 2", KeyExpression}, {"$1 % 2", KeyExpression}, {"($1 ^ 2)::int8", KeyExpression},
		{"$1 & 2", KeyExpression}, {"$1 | 2", KeyExpression}, {"$1 # 2", KeyExpression}, {"$1 << 2", KeyExpression}, {"$1 >> 2", KeyExpression}, {"$1 - 2", KeyExpression},
		{"($1 < 2)::int", KeyExpression}, {"($1 > 2)::int", KeyExpression}, {"($1 = 2)::int", KeyExpression}, {"($1 <= 2)::int", KeyExpression},
		{"($1 >= 2)::int", KeyExpression}, {"($1 <> 2)::int", KeyExpression}, {"($1 != 2)::int", KeyExpression}, {"('a' ~ 'b')::int", KeyExpression},
		{"(@ $1)", KeyExpression}, {"($1 ? 2)::int", KeyUnknown}, {"@ NULL", KeyUnknown}, {"+NULL", KeyUnknown}, {"hashtext(E'\\uD8')", KeyUnknown}, {"-$1", KeyExpression}, {"1, hashtext('a')", KeyExpression},
		{"1.5", KeyExpression}, {"'1'::text::int8", KeyExpression},
		{"NULL", KeyNull}, {"$3", KeyNull}, {"$4, NULL", KeyNull}, {"NULL, hashtext($4)", KeyNull}, {"$3, 'x'", KeyNull}, {"-NULL::int8", KeyNull},
		{"$2", KeyUnknown}, {"$4", KeyUnknown}, {"1, $4", KeyUnknown}, {"hashtext($4)", KeyUnknown}, {"hashtext($3)", KeyUnknown},
		{"hashtext($2), $4", KeyUnknown}, {"hashtext(NULL)", KeyUnknown}, {"1 + NULL", KeyUnknown}, {"NULL::int8 + 1", KeyUnknown},
		{"('{}'::json ->> 'a')::int8", KeyUnknown}, {"('{}'::json ->> 'a')::int8 + 1", KeyUnknown}, {"-('{}'::json ->> 'a')::int8", KeyUnknown},
		{"('{}'::json ->> 'a')::text::int8", KeyUnknown}, {"'x'::int8::text::int8", KeyUnknown}, {"-((-32768)::int2)", KeyUnknown},
		{"'1x1'", KeyUnknown}, {"'5b1'", KeyUnknown}, {"'0y1'", KeyUnknown}, {"'0'", KeyNumber},
		{"9223372036854775808", KeyUnknown}, {"-9223372036854775809", KeyUnknown}, {"3000000000::int4", KeyUnknown},
		{"1, 2147483648", KeyUnknown}, {"-2147483649, 1", KeyUnknown}, {"$8, 1", KeyUnknown}, {"$8::int4", KeyUnknown},
		{"'x'", KeyUnknown}, {"'x'::int8 + 1", KeyUnknown}, {"-'9223372036854775808'::int8", KeyUnknown},
		{"-(-9223372036854775808)::int8", KeyUnknown}, {"E'\\uD8'", KeyUnknown}, {"U&'\\00'", KeyUnknown}, {"U&'a' UESCAPE '+'", KeyUnknown},
	} {
		st := r.Parse("SELECT pg_advisory_lock("+tt.args+")", true)
		if st.Form != Plain {
			t.Errorf("%s: %s", tt.args, st.Form)
			continue
		}
		k := st.Calls[0].Key(testArg)
		if k.Kind != tt.want {
			t.Errorf("%s: kind %d, want %d", tt.args, k.Kind, tt.want)
		}
		if (k.Identity != "") != (k.Kind == KeyExpression) || k.Kind != KeyNumber && (k.Bigint != 0 || k.Pair != [2]int32{}) {
			t.Errorf("%s: %#v", tt.args, k)
		}
	}
}

// The same lock written in two ways is one key; other values make another.
func TestKeyIdentity(t *testing.T) {
	r := New(nil)
	key := func(args string) Key {
		return r.Parse("SELECT pg_advisory_lock("+args+")", true).Calls[0].Key(testArg)
	}
	for _, same := range [][2]string{
		{"7", "$1"}, {"'7'::int8", "7"}, {"-0", "0"}, {"'-0'", "0"}, {"-3", "$9"}, {"5, hashtext($2)", "'5', hashtext($2)"}, {"-5", "$5"}, {"1, 7", "'1', $1"},
		{"hashtext($2)", "hashtext($2)"}, {"hashtext($2)", "pg_catalog.HashText( /* a */ $2 )"},
		{"$1, hashtext($2)", "7, hashtext( $2 )"}, {"hashtext('a'||'b')", "hashtext('a' || U&'\\0062')"},
		{"NULL", "$3"},
	} {
		if a, b := key(same[0]), key(same[1]); a != b {
			t.Errorf("%s and %s: %#v, %#v", same[0], same[1], a, b)
		}
	}
	for _, other := range [][2]string{
		{"7", "8"}, {"7", "0, 7"}, {"1, 2", "2, 1"}, {"hashtext($2)", "hashtext('abd')"}, {"hashtext($2)", "hashtextextended($2, 0)"},
		{"hashtext('a''||''b')", "hashtext('a'||'b')"}, {"hashtext(U&'\\D83D\\DE00')", "hashtext(U&'\\D83D\\DE01')"},
		{"1 + $1", "1 + $5"}, {"hashtext('a')", "hashtext('A')"}, {`'a'::"X"::int`, "'a'::x::int"},
		{"x'1F'::int8", "x'2F'::int8"}, {"x'1'::int8", "b'1'::int8"}, {"hashtext($2), 1", "hashtext($2), 2"}, {"hashtext($2), $1", "hashtext($2), $9"},
	} {
		if a, b := key(other[0]), key(other[1]); a == b {
			t.Errorf("%s and %s: both %#v", other[0], other[1], a)
		}
	}
	for _, args := range [][2]string{{"5, hashtext($2)", "6, hashtext($2)"}, {"hashtext($2), $1", "hashtext($2), $9"}} {
		if a, b := key(args[0]).Identity, key(args[1]).Identity; a == b || a == "" {
			t.Errorf("%s and %s: both %q", args[0], args[1], a)
		}
	}
	// What is the same but for the parameter's place has one identity, although reports show the place.
	if a, b := key("hashtext($2)"), key("hashtext('abc')"); a.Identity != b.Identity {
		t.Errorf("%#v, %#v", a, b)
	}
}

func TestUnlockAllHasNoKey(t *testing.T) {
	c := New(nil).Parse("SELECT pg_advisory_unlock_all()", true).Calls[0]
	if k := c.Key(testArg); k != (Key{Kind: KeyUnknown}) || k.String() != "" || c.Args != nil {
		t.Errorf("%#v, %#v", k, c)
	}
}

// What is no expression keeps no pieces; of one all are kept, however long it is.
func TestPieces(t *testing.T) {
	if a := New(nil).Parse("SELECT pg_advisory_lock(($1))", true).Calls[0].Args[0]; a.pieces != nil {
		t.Error("pieces without need")
	}
	many := "0"
	for i := range 100 {
		many += fmt.Sprint("+$", i+1)
	}
	if k := New(nil).Parse("SELECT pg_advisory_lock("+many+")", true).Calls[0].Key(func(n int) (any, bool) { return int64(n), true }); !strings.HasSuffix(k.Identity, "+ '100'") {
		t.Error(k.Identity)
	}
}

func TestLongExpressionIsCut(t *testing.T) {
	long := strings.Repeat("ä", 300)
	a := New(nil).Parse(`SELECT pg_advisory_lock(hashtext($1)+"`+long+`")`, true).Calls[0].Args[0]
	if len(a.Expr) > maxExpr+len("…") || !strings.HasSuffix(a.Expr, "ä…") {
		t.Errorf("%d bytes: %s", len(a.Expr), a.Expr)
	}
	c := New(nil).Parse("SELECT pg_advisory_lock(hashtext('a')"+strings.Repeat("+1", 200)+"+$1)", true).Calls[0]
	if k := c.Key(testArg); !strings.HasSuffix(k.Identity, "+ 1 + '7'") || len(k.Expr) > maxExpr+len("…") {
		t.Errorf("%#v", k)
	}
}

func TestConcurrentUse(t *testing.T) {
	r := New([]string{"f"})
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for j := range 500 {
				text := fmt.Sprintf("SELECT pg_advisory_lock(%d)", (i*j)%300)
				if got := r.Parse(text, true).Calls[0].Key(testArg).Bigint; got != int64(i*j%300) {
					t.Error(text, got)
				}
			}
		})
	}
	wg.Wait()
}
