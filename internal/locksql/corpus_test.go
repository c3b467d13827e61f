package locksql_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgadvlock/pgadvlock/internal/locksql"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

// The corpus: texts are run on a real server, and what was foretold of them is held against what another connection
// sees in pg_locks.

// functions are the eleven, with what each does, told apart from the package under test.
var functions = []struct {
	name          string
	session, lock bool
	mode          string // "" is both
}{
	{"pg_advisory_lock", true, true, "ExclusiveLock"},
	{"pg_advisory_lock_shared", true, true, "ShareLock"},
	{"pg_try_advisory_lock", true, true, "ExclusiveLock"},
	{"pg_try_advisory_lock_shared", true, true, "ShareLock"},
	{"pg_advisory_xact_lock", false, true, "ExclusiveLock"},
	{"pg_advisory_xact_lock_shared", false, true, "ShareLock"},
	{"pg_try_advisory_xact_lock", false, true, "ExclusiveLock"},
	{"pg_try_advisory_xact_lock_shared", false, true, "ShareLock"},
	{"pg_advisory_unlock", true, false, "ExclusiveLock"},
	{"pg_advisory_unlock_shared", true, false, "ShareLock"},
	{"pg_advisory_unlock_all", true, false, ""},
}

// How a context must be judged, beside what pg_locks says.
type judged int

const (
	plain   judged = iota // runs, counted
	opaque                // runs
	idle                  // does not run: no call
	careful               // does not run, but that is more than the text is read for
)

// contexts hold a call in the place of CALL. Each runs in a transaction of its own that is rolled back.
var contexts = []struct {
	judged judged
	text   string
}{
	{plain, "SELECT CALL"},
	{plain, "SELECT CALL AS x;"},
	{plain, "/* a */ select -- b\n CALL \"x y\" ; ;"},
	{plain, "SELECT CALL, pg_try_advisory_lock(77) AS b"},
	{plain, "SELECT pg_try_advisory_xact_lock_shared(7, 8) a, CALL b"},

	{opaque, "SELECT CALL WHERE true"},
	{opaque, "SELECT 1 WHERE CALL IS NOT NULL"},
	{opaque, "SELECT id FROM t WHERE CALL IS NOT NULL"},
	{opaque, "SELECT CALL FROM t"},
	{opaque, "SELECT * FROM CALL"},
	{opaque, "SELECT * FROM CALL AS x"},
	{opaque, "SELECT * FROM t, LATERAL CALL AS x"},
	{opaque, "SELECT * FROM ROWS FROM (CALL) AS x"},
	{opaque, "SELECT (CALL)"},
	{opaque, "SELECT CALL::text"},
	{opaque, "SELECT ARRAY[CALL::text]"},
	{opaque, "SELECT CASE WHEN true THEN CALL END"},
	{opaque, "SELECT coalesce(CALL::text, '')"},
	{opaque, "SELECT (SELECT CALL)"},
	{opaque, "SELECT CALL IS NULL"},
	{opaque, "SELECT CALL isnull"},
	{opaque, "SELECT ALL CALL"},
	{opaque, "SELECT 1, CALL"},
	{opaque, "SELECT CALL LIMIT 1"},
	{opaque, "SELECT 1 LIMIT length(CALL::text) + 1"},
	{opaque, "SELECT CALL UNION ALL SELECT CALL"},
	{opaque, "(SELECT CALL)"},
	{opaque, "SELECT 1 UNION ALL (SELECT length(CALL::text))"},
	{opaque, "WITH a AS MATERIALIZED (SELECT CALL) SELECT * FROM a"},
	{opaque, "WITH a AS (SELECT 1) SELECT CALL"},
	{opaque, "SELECT * FROM (SELECT CALL) AS x"},
	{opaque, "SELECT count(CALL::text) FROM t GROUP BY id HAVING CALL IS NOT NULL"},
	{opaque, "SELECT count(CALL::text) FILTER (WHERE true) FROM t"},
	{opaque, "VALUES (CALL::text)"},
	{opaque, "SELECT id FROM t ORDER BY CALL::text, id"},
	{opaque, "SELECT CALL::text INTO TEMP x"},
	{opaque, "INSERT INTO t (id, a) VALUES (9, CALL::text)"},
	{opaque, "INSERT INTO t (id, a) SELECT 9, CALL::text"},
	{opaque, "INSERT INTO t (id) VALUES (9) RETURNING CALL"},
	{opaque, "INSERT INTO t (id) VALUES (1) ON CONFLICT (id) DO UPDATE SET a = CALL::text"},
	{opaque, "UPDATE t SET a = CALL::text"},
	{opaque, "DELETE FROM t WHERE CALL IS NOT NULL"},
	{opaque, "MERGE INTO t USING (VALUES (1)) v (id) ON t.id = v.id WHEN MATCHED THEN UPDATE SET a = CALL::text"},
	{opaque, "COPY (SELECT CALL) TO STDOUT"},
	{opaque, "CREATE TABLE x AS SELECT CALL::text"},
	{opaque, "CREATE TEMP TABLE x AS VALUES (CALL::text)"},
	{opaque, "CREATE MATERIALIZED VIEW x AS SELECT CALL::text"},
	{opaque, "ALTER TABLE t ADD COLUMN x text DEFAULT CALL::text"},
	{opaque, "ALTER TABLE t ALTER COLUMN a TYPE text USING CALL::text"},
	{opaque, "CREATE TABLE x PARTITION OF parted FOR VALUES IN (length(CALL::text))"},
	{opaque, "EXPLAIN ANALYZE SELECT CALL"},
	{opaque, "EXPLAIN ANALYZE VERBOSE SELECT CALL"},
	{opaque, "EXPLAIN (ANALYZE) SELECT CALL"},
	{opaque, "EXPLAIN (COSTS off, ANALYSE 'true', VERBOSE) SELECT CALL"},
	{opaque, "EXPLAIN (ANALYZE off, ANALYZE on) SELECT CALL"},
	{opaque, "EXPLAIN (\"analyze\") SELECT CALL"},
	{opaque, "EXPLAIN (BUFFERS -0, ANALYZE +1) SELECT CALL"},
	{opaque, "EXPLAIN ANALYZE CREATE TABLE x AS SELECT CALL::text"},
	{opaque, "EXPLAIN ANALYZE DECLARE c CURSOR FOR SELECT CALL"},
	{opaque, "DO $$ BEGIN PERFORM CALL; END $$"},
	{opaque, "DO LANGUAGE plpgsql 'BEGIN IF CALL IS NULL THEN NULL; END IF; END'"},
	{opaque, "DO $$ DECLARE x text := CALL; BEGIN END $$"},
	{opaque, "DO $$ BEGIN EXECUTE 'SELECT CALL'; END $$"},
	{opaque, "DO $$ BEGIN EXECUTE format('SELECT %s', 'CALL'); END $$"},
	{opaque, "DO $$ BEGIN EXECUTE $q$DO 'BEGIN PERFORM CALL; END'$q$; END $$"},
	{opaque, "DO 'BEGIN RAISE DEBUG ''--''; PERFORM CALL; END'"},
	{opaque, "DO $$ BEGIN FOR i IN 1..2 LOOP PERFORM CALL; END LOOP; END $$"},
	{opaque, "DO $$ DECLARE c CURSOR FOR SELECT CALL::text AS x; BEGIN FOR r IN c LOOP NULL; END LOOP; END $$"},
	{opaque, "SELECT 1; SELECT CALL"},
	{opaque, "SELECT CALL; SELECT 1"},
	{opaque, "; SELECT CALL"},
	{opaque, "SAVEPOINT a; SELECT CALL; RELEASE a"},
	{opaque, "PREPARE p AS SELECT 1; EXECUTE p; SELECT CALL; DEALLOCATE p"},
	{opaque, "CREATE FUNCTION b() RETURNS int BEGIN ATOMIC SELECT 1 AS case; END; SELECT CALL"},
	{opaque, "CREATE DOMAIN atomic AS int; CREATE FUNCTION x(begin atomic) RETURNS atomic LANGUAGE sql AS 'SELECT 1'; SELECT CALL"},
	{opaque, "CREATE FUNCTION begin() RETURNS int LANGUAGE sql AS 'SELECT 1'; SELECT CALL"},
	{opaque, "CREATE RULE x AS ON INSERT TO t DO ALSO (SELECT 1; SELECT 2); SELECT CALL"},
	{opaque, "EXECUTE echo(CALL::text)"},
	{opaque, "EXPLAIN EXECUTE echo(CALL::text)"},
	{opaque, "CREATE TABLE x AS EXECUTE echo(CALL::text)"},
	{opaque, "CREATE TABLE x AS EXECUTE echo(CALL::text) WITH NO DATA"},
	{opaque, "EXPLAIN CREATE TABLE x AS EXECUTE echo(CALL::text)"},
	{opaque, "DECLARE c CURSOR FOR SELECT CALL; FETCH c"},
	{opaque, "DECLARE c CURSOR WITH HOLD FOR SELECT CALL; FETCH ALL FROM c; CLOSE c"},
	{opaque, "CALL proc((CALL)::text)"}, // and the words of the statement itself

	{careful, "SELECT CALL LIMIT 0"},
	{careful, "SELECT CALL WHERE false"},
	{careful, "SELECT CASE WHEN false THEN CALL END"},
	{careful, "DECLARE c CURSOR FOR SELECT CALL"},
	{careful, "DO $$ BEGIN RAISE DEBUG 'CALL'; END $$"},
	{careful, "CREATE TABLE x (a text DEFAULT CALL::text)"},

	{idle, "SELECT 'CALL'"},
	{idle, "SELECT E'\\'CALL'"},
	{idle, "SELECT '''CALL', ''''"},
	{idle, "SELECT 'a'\n'CALL'"},
	{idle, "SELECT 'a' -- '\n '; CALL'"},
	{idle, "SELECT $$CALL$$"},
	{idle, "SELECT $a$ $b$ CALL $b$ $a$"},
	{idle, "SELECT $é1$ $é$ CALL $é1$"},
	{idle, "SELECT U&'\\0027 CALL'"},
	{idle, "SELECT 1 AS \"CALL\""},
	{idle, "SELECT 1 AS U&\"\\0061 CALL\""},
	{idle, "SELECT 1 /* CALL */"},
	{idle, "SELECT 1 /* /* */ CALL */"},
	{idle, "SELECT 1 -- CALL"},
	{idle, "SELECT 1 --' CALL\n"},
	{idle, "SELECT 1 +--CALL\n 2"},
	{idle, "SELECT 1 */*CALL*/ 2"},
	{idle, "EXPLAIN SELECT CALL"},
	{idle, "EXPLAIN VERBOSE SELECT CALL"},
	{idle, "EXPLAIN (ANALYZE false) SELECT CALL"},
	{idle, "EXPLAIN (ANALYZE 0, COSTS) SELECT CALL"},
	{idle, "EXPLAIN (ANALYZE, ANALYZE 'off') SELECT CALL"},
	{idle, "EXPLAIN (ANALYZE -0) SELECT CALL"},
	{idle, "EXPLAIN (SELECT CALL)"},
	{idle, "EXPLAIN CREATE TABLE x AS SELECT CALL::text"},
	{idle, "EXPLAIN ANALYZE CREATE TABLE x AS SELECT CALL::text WITH NO DATA"},
	{idle, "CREATE TABLE x AS SELECT CALL::text WITH NO DATA"},
	{idle, "CREATE MATERIALIZED VIEW x AS SELECT CALL::text WITH NO DATA"},
	{idle, "CREATE VIEW x AS SELECT CALL::text"},
	{idle, "CREATE OR REPLACE TEMP VIEW x AS SELECT CALL::text"},
	{idle, "CREATE RECURSIVE VIEW x (a) AS SELECT CALL::text"},
	{idle, "CREATE FUNCTION x() RETURNS void LANGUAGE sql AS 'SELECT CALL'"},
	{idle, "CREATE FUNCTION x(a text DEFAULT CALL) RETURNS void LANGUAGE sql AS ''"},
	{idle, "CREATE FUNCTION x() RETURNS text BEGIN ATOMIC SELECT CALL; SELECT CASE WHEN true THEN CALL::text END; END"},
	{idle, "CREATE OR REPLACE PROCEDURE x() BEGIN ATOMIC INSERT INTO t VALUES (1, CALL::text); END"},
	{idle, "CREATE FUNCTION x() RETURNS text RETURN CALL"},
	{idle, "CREATE RULE x AS ON INSERT TO t DO ALSO (SELECT CALL; SELECT 2)"},
	{idle, "CREATE POLICY x ON t USING (CALL IS NOT NULL)"},
	{idle, "CREATE TRIGGER x BEFORE INSERT ON t FOR EACH ROW WHEN (CALL IS NOT NULL) EXECUTE FUNCTION suppress_redundant_updates_trigger()"},
	{idle, "ALTER POLICY pol ON t USING (CALL IS NOT NULL)"},
	{idle, "PREPARE p AS SELECT CALL; DEALLOCATE p"},
	{idle, "COMMENT ON TABLE t IS 'CALL'"},
}

// spellings write a function's name.
var spellings = []func(name string) string{
	strings.ToUpper,
	func(s string) string { return strings.ToUpper(s[:4]) + s[4:] },
	func(s string) string { return `"` + s + `"` },
	func(s string) string { return "pg_catalog." + s },
	func(s string) string { return "PG_CATALOG . " + strings.ToUpper(s) },
	func(s string) string { return `"pg_catalog"."` + s + `"` },
	func(s string) string { return "pg_catalog/**/./* . */" + s },
	func(s string) string { return "pg_catalog--\n." + s },
	func(s string) string { return s + " " },
	func(s string) string { return s + "/* ( */" },
	func(s string) string { return s + "\n--(\n\t" },
	func(s string) string { return `U&"` + strings.Replace(s, "_", `\005f`, 1) + `"` },
	func(s string) string { return `U&"` + strings.Replace(s, "_", `!00005F`, 1) + `" UESCAPE '!'` },
	func(s string) string { return `u&"` + strings.Replace(s, "_", `\+00005f`, 1) + `"` },
	func(s string) string { return "current." + s },           // no such schema
	func(s string) string { return "pg_catalog.x" + s },       // no such function
	func(s string) string { return "wrap." + s },              // a function of the same name that calls it
	func(s string) string { return "corpus.pg_catalog." + s }, // with the database's name
}

// values are literals and expressions that may be a key, alone and as one of a pair.
var values = strings.Split(`42|-42|+42|- -42|-(-(42))|(42)|((-42))|0|-0|007|'42'|' 42 '|'-42'|'+42'|E'42'|E'\x34\062'|e'\u0034\U00000032'|`+
	`$$42$$|$q$42$q$|U&'4\0032'|U&'4!0032' UESCAPE '!'|'4'`+"\n"+`'2'|'4' -- '7'`+"\n"+` '2'|42::int|42::int4|42::pg_catalog.int4|42::smallint|`+
	`42::"int2"|'42'::integer|'42'::int4|CAST(42 AS int)|CAST('42' AS smallint)|cast(cast('42' as int8) as int4)|int '42'|int4 '42'|`+
	`pg_catalog.int4 '42'|"int4" '42'|smallint '42'|integer $$42$$|-42::int|- 42::int2|(-42)::int|-'42'::int|NULL|NULL::int|CAST(NULL AS int)|`+
	`1+2|1 + -2|1 - -2|6*7|84/2|-(1+2)|1|-1|~1|@ -5|5 % 3|1<<4|(1 << 4) \| 3|7 & 3|7 # 2|2147483647|-2147483648|`+
	`hashtext('a')|pg_catalog.hashtext('a')|"hashtext"('a')|HashText ( 'a' || 'b' )|hashtext('a'::text)|hashtext(text 'a')|hashtext(42::text)|`+
	`hashtext($$x$$||E'\'')|hashtext('it''s')|hashtext('é')|hashtext(U&'\D83D\DE00')|hashtext('1'::varchar(1))|-hashtext('a')|hashtext('a')::int|`+
	`hashtext(NULL)|NULL + 1|'1'::text::int|'12'::char(1)::int|'1.5'::numeric::int|'1.5'::numeric(10,2)::int|1.5::int|1e1::int|.5::int|12e-1::int|`+
	`x'1F'::int|B'101'::int|'t'::regclass::oid::int|date '2024-01-02' - date '2024-01-01'|('{"a":1}'::json ->> 'a')::int|('{}'::json ->> 'a')::int|`+
	`40000::int2|'40000'::smallint|-32768::int2|(-32768)::int2|2147483648::int|'x'|''|'4 2'|'1_0'|'0x1F'|true|1.5|'1.5'|id|now()|(SELECT 42)|abs(-42)|`+
	`ARRAY[42]|key => 42|42 42|42,|1::a.b.c|''::x|N'42'|9223372036854775807::int`, "|")

// bigValues are keys of the bigint space only.
var bigValues = []string{"9223372036854775807", "-9223372036854775808", "9223372036854775808", "-9223372036854775809", "'9223372036854775807'",
	"'-9223372036854775808'", "'9223372036854775808'", "3000000000", "'3000000000'::bigint", "bigint '-3000000000'", "42::int8", "CAST('42' AS pg_catalog.int8)",
	"-9223372036854775808::int8", "(-9223372036854775808)::int8", "hashtextextended('a', 0)", "pg_catalog.hashtextextended('a'||'b', 5)",
	"hashtext('a')::bigint", "hashtextextended(NULL, 0)", "2147483648", "('x'||'0123456789abcdef')::bit(64)::bigint", "99999999999999999999", "-(-9223372036854775808)"}

// corpus is the state of the test: a connection that runs texts, and one that looks.
type corpus struct {
	t    *testing.T
	r    *locksql.Recognizer
	conn *pgconn.PgConn
	look *pgx.Conn
	off  bool // standard_conforming_strings is off

	version int // of the server, as 150018
	all     int
	ran     int // texts the server accepted
}

func newCorpus(t *testing.T) *corpus {
	s := pgtest.Shared(t)
	db := s.NewDB(t)
	ctx := context.Background()
	c := &corpus{t: t, r: locksql.New(nil), version: s.Version()}
	var err error
	if c.conn, err = pgconn.Connect(ctx, s.DSN(db)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.conn.Close(ctx) })
	if c.look, err = pgx.Connect(ctx, s.DSN(db)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.look.Close(ctx) })
	setup := `CREATE TABLE t (id bigint PRIMARY KEY, a text); INSERT INTO t VALUES (1), (2), (3);
		CREATE TABLE parted (a int) PARTITION BY LIST (a);
		CREATE POLICY pol ON t USING (true);
		CREATE PROCEDURE proc(text) LANGUAGE sql AS '';
		CREATE SCHEMA wrap;
		PREPARE echo(text) AS SELECT $1;
		SET client_min_messages = error;`
	for _, f := range functions {
		args, call := "a bigint", "a"
		if f.name == "pg_advisory_unlock_all" {
			args, call = "", ""
		}
		setup += fmt.Sprintf("CREATE FUNCTION wrap.%s(%s) RETURNS text LANGUAGE sql AS 'SELECT pg_catalog.%s(%s)::text';", f.name, args, f.name, call)
	}
	if err := c.exec(setup); err != nil {
		t.Fatal(err)
	}
	return c
}

func (c *corpus) exec(text string) error {
	_, err := c.conn.Exec(context.Background(), text).ReadAll()
	if c.conn.IsClosed() {
		c.t.Fatalf("%s: %v", text, err)
	}
	return err
}

// locks lists what the connection holds, as another sees it.
func (c *corpus) locks() []string {
	rows, err := c.look.Query(context.Background(),
		"SELECT classid, objid, objsubid, mode FROM pg_locks WHERE locktype = 'advisory' AND pid = $1", c.conn.PID())
	if err != nil {
		c.t.Fatal(err)
	}
	locks, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (string, error) {
		var class, obj uint32
		var sub uint16
		var mode string
		err := row.Scan(&class, &obj, &sub, &mode)
		if sub == 1 {
			return fmt.Sprint(int64(class)<<32|int64(obj), " ", mode), err
		}
		return fmt.Sprintf("(%d, %d) %s", int32(class), int32(obj), mode), err
	})
	if err != nil {
		c.t.Fatal(err)
	}
	slices.Sort(locks)
	return locks
}

// run executes a text in a transaction, the session holding before, and holds what is seen against what was foretold.
// It returns the analysis, whether the locks changed, and the server's error.
func (c *corpus) run(text string, before []string, params ...[]byte) (st *locksql.Statement, changed bool, err error) {
	c.t.Helper()
	ctx := context.Background()
	if err := c.exec("BEGIN"); err != nil {
		c.t.Fatal(err)
	}
	if len(params) > 0 {
		err = c.conn.ExecParams(ctx, text, params, nil, nil, nil).Read().Err
	} else {
		err = c.exec(text)
	}
	c.all++
	if err == nil {
		c.ran++
	}
	after := c.locks()
	if rollback := c.exec("ROLLBACK"); rollback != nil {
		c.t.Fatal(rollback)
	}
	changed = !slices.Equal(before, after)

	st = c.r.Parse(text, !c.off)
	switch {
	case st.Form == locksql.NoCall && changed && !slices.ContainsFunc(st.Steps, func(s locksql.Step) bool { return s.Kind == locksql.StepExecute }):
		c.t.Errorf("judged no call: %s\nlocks before %q, after %q", text, before, after)
	case st.Form == locksql.Plain && err == nil:
		if want := c.foretold(text, st, before, params); !slices.Equal(want, after) {
			c.t.Errorf("plain: %s\nforetold %q\nseen     %q", text, want, after)
		}
	}
	if !st.Session {
		if kept := c.locks(); !slices.Equal(before, kept) {
			c.t.Errorf("judged to take no session lock: %s\nbefore %q, after its transaction %q", text, before, kept)
		}
	}
	return st, changed, err
}

// foretold is what a plain statement leaves, were it what it was read as.
func (c *corpus) foretold(text string, st *locksql.Statement, before []string, params [][]byte) []string {
	held := map[string]bool{}
	for _, l := range before {
		held[l] = true
	}
	for _, call := range st.Calls {
		mode := "ExclusiveLock"
		if call.Func.Share() {
			mode = "ShareLock"
		}
		if call.Func == locksql.UnlockAll {
			for l := range held {
				if l != "(7, 8) ShareLock" { // the corpus's only transaction lock beside a call
					delete(held, l)
				}
			}
			continue
		}
		key := call.Key(func(n int) (any, bool) {
			if params[n-1] == nil {
				return nil, true
			}
			return string(params[n-1]), true
		})
		name := key.String()
		switch key.Kind {
		case locksql.KeyNull:
			continue
		case locksql.KeyExpression:
			name = c.evaluate(text[call.Start:call.End], params)
		case locksql.KeyUnknown:
			if name = c.evaluate(text[call.Start:call.End], params); name == "NULL" {
				continue
			}
			if !strings.Contains(text, "->>") && !strings.Contains(text, "NULL") {
				c.t.Errorf("the server knows the key, we do not: %s", text)
			}
		}
		if call.Func.Release() {
			delete(held, name+" "+mode)
		} else {
			held[name+" "+mode] = true
		}
	}
	locks := []string{}
	for l := range held {
		locks = append(locks, l)
	}
	slices.Sort(locks)
	return locks
}

// evaluate has the server compute a call's arguments.
func (c *corpus) evaluate(call string, params [][]byte) string {
	args := call[strings.IndexByte(call, '(')+1 : len(call)-1]
	res := c.conn.ExecParams(context.Background(), "SELECT "+args, params, nil, nil, nil).Read()
	if res.Err != nil {
		c.t.Fatalf("SELECT %s: %v", args, res.Err)
	}
	parts := []string{}
	for _, v := range res.Rows[0] {
		if v == nil {
			return "NULL"
		}
		parts = append(parts, string(v))
	}
	if len(parts) == 2 {
		return "(" + strings.Join(parts, ", ") + ")"
	}
	return parts[0]
}

// hold gives the session exactly these locks.
func (c *corpus) hold(keys ...string) []string {
	text := "SELECT pg_advisory_unlock_all()"
	for _, k := range keys {
		text += fmt.Sprintf("; SELECT pg_advisory_lock(%s), pg_advisory_lock_shared(%[1]s)", k)
	}
	if err := c.exec(text); err != nil {
		c.t.Fatal(err)
	}
	return c.locks()
}

// inContext puts a call into a context; inside quotes of the context a call's own are doubled.
func inContext(text, call string) string {
	if text == "CALL proc((CALL)::text)" {
		return "CALL proc((" + call + ")::text)"
	}
	return strings.ReplaceAll(text, "CALL", call)
}

// TestCorpusContexts: every function in every context.
func TestCorpusContexts(t *testing.T) {
	c := newCorpus(t)
	none := c.hold()
	for _, f := range functions {
		for i, ctx := range contexts {
			if strings.HasPrefix(ctx.text, "MERGE") && c.version < 150000 {
				continue
			}
			call := f.name + "(42)"
			if i%3 == 1 {
				call = f.name + "(-1, 9527)"
			}
			if f.name == "pg_advisory_unlock_all" {
				call = f.name + "()"
			}
			text := inContext(ctx.text, call)
			before := none
			if !f.lock {
				before = c.hold("42", "-1, 9527")
			}
			st, changed, err := c.run(text, before)
			if err != nil {
				t.Errorf("%s: %v", text, err)
			}
			switch ctx.judged {
			case plain, opaque:
				if !changed {
					t.Errorf("a context that should run the call does not: %s", text)
				}
				if want := map[judged]locksql.Form{plain: locksql.Plain, opaque: locksql.Opaque}[ctx.judged]; st.Form != want {
					t.Errorf("%s: %s, want %s", text, st.Form, want)
				}
				if st.Session != (f.session || strings.Contains(text, "77") || strings.HasPrefix(text, "CALL")) {
					t.Errorf("%s: session %v", text, st.Session)
				}
			case idle:
				if st.Form != locksql.NoCall {
					t.Errorf("%s: %s, but does not run", text, st.Form)
				}
				fallthrough
			case careful:
				if changed {
					t.Errorf("a context that should not run the call does: %s", text)
				}
			}
			if f.lock && changed {
				c.hold()
			}
		}
	}
	t.Logf("%d texts", c.all)
}

// TestCorpusSpellings: every function's name in every spelling.
func TestCorpusSpellings(t *testing.T) {
	c := newCorpus(t)
	for _, f := range functions {
		args := "(42)"
		if f.name == "pg_advisory_unlock_all" {
			args = "()"
		}
		for _, spell := range spellings {
			for _, ctx := range []string{"SELECT CALL", "SELECT CALL AS x", "SELECT * FROM CALL", "DO $$ BEGIN PERFORM CALL; END $$", "SELECT '', CALL --"} {
				before := c.hold()
				if !f.lock {
					before = c.hold("42")
				}
				text := inContext(ctx, spell(f.name)+args)
				st, changed, _ := c.run(strings.Replace(text, "corpus.", c.database()+".", 1), before)
				if !changed && st.Form == locksql.Plain {
					t.Errorf("plain, but nothing changed: %s", text)
				}
			}
		}
	}
	t.Logf("%d texts, %d accepted", c.all, c.ran)
}

func (c *corpus) database() string { return c.look.Config().Database }

// TestCorpusArguments: every value as a key, as the first and as the second of a pair, in text and as a parameter.
func TestCorpusArguments(t *testing.T) {
	c := newCorpus(t)
	before := c.hold()
	plain := 0
	run := func(f, args string, params ...[]byte) {
		text := "SELECT " + f + "(" + args + ")"
		st, changed, err := c.run(text, before, params...)
		if st.Form == locksql.Plain {
			plain++
		}
		if err != nil && changed {
			t.Errorf("%s: %v, and a lock", text, err)
		}
		if changed && st.Session {
			c.hold()
		}
	}
	for i, v := range slices.Concat(values, bigValues) {
		f := functions[i%8].name
		run(f, v)
		run(f, "1, "+v)
		run(f, v+", '-2'::int")
		for _, cast := range []string{"::bigint", "::int4", "::smallint::int"} {
			run(f, "("+v+")"+cast)
		}
		run(f, "-("+v+")")
		run(f, "CAST("+v+" AS int)")
	}
	for i, v := range []string{"42", "-42", " 42 ", "+42", "007", "x", "", "9223372036854775807", "-9223372036854775808", "9223372036854775808",
		"2147483648", "-2147483648", "40000", "1.5", "1e3", "4 2", "--1", "\t42\n", "it's"} {
		f := functions[i%8].name
		for _, args := range []string{"$1", "$1::int", "$1::int2", "CAST($1 AS bigint)", "($1)", "1, $1", "$1, 1", "-$1::bigint", "hashtext($1)",
			"hashtext($1), 3", "hashtext($1::text)::bigint", "hashtextextended($1, 0)", "length", "$1::text::int", "$1 + 1", "1, $1 % 3", "$1::numeric::int"} {
			run(f, args, []byte(v))
		}
		run(f, "$1, $2", []byte(v), []byte("5"))
		run(f, "$2, hashtext($1)", []byte(v), []byte("5"))
		run(f, "$2, $1", []byte(v), nil)
	}
	run("pg_advisory_lock", "$1::int", nil)
	t.Logf("%d texts, %d accepted, %d plain", c.all, c.ran, plain)
}

// TestCorpusPerRow: where the rule is silent on rows that a statement makes, there is a row for each lock; where it
// speaks, there may be locks without a row.
func TestCorpusPerRow(t *testing.T) {
	c := newCorpus(t)
	for _, tt := range []struct {
		text   string
		perRow bool
	}{
		{"SELECT pg_advisory_xact_lock(k) FROM unnest('{3,1,2}'::bigint[]) AS k ORDER BY k", false},
		{"SELECT k FROM generate_series(1, 3) k ORDER BY pg_advisory_xact_lock(k)::text, k", false},
		{"SELECT pg_advisory_xact_lock(k) FROM unnest('{3,1,2}'::bigint[]) WITH ORDINALITY AS t(k, n) ORDER BY n DESC", false},
		{"SELECT pg_advisory_xact_lock(a, b) FROM ROWS FROM (generate_series(1, 3), unnest('{4,5,6}'::int[])) AS t(a, b)", false},
		{"SELECT pg_advisory_xact_lock(a, b) FROM generate_series(1, 3) a, LATERAL generate_series(1, a) b ORDER BY b, a", false},
		{"SELECT pg_advisory_xact_lock(a, b) FROM generate_series(1, 3) a CROSS JOIN generate_series(1, 3) b", false},
		{"SELECT * FROM generate_series(1, 3) k, pg_try_advisory_xact_lock(k) ok", false},
		{"SELECT pg_advisory_xact_lock(k) FROM (VALUES (2), (1)) AS v(k) ORDER BY k", false},
		{"SELECT pg_advisory_xact_lock(k) FROM (SELECT DISTINCT k FROM generate_series(1, 9) k WHERE k > 2 ORDER BY k LIMIT 3) s", false},
		{"SELECT pg_advisory_xact_lock(k) FROM unnest(ARRAY(SELECT id FROM t ORDER BY id LIMIT 2)) k", false},

		{"SELECT k FROM generate_series(1, 9) k WHERE pg_try_advisory_xact_lock(k) AND k % 5 = 0", true},
		{"SELECT k FROM generate_series(1, 9) k ORDER BY pg_advisory_xact_lock(k)::text LIMIT 2", true},
		{"SELECT DISTINCT pg_try_advisory_xact_lock(k) FROM generate_series(1, 9) k", true},
		{"SELECT count(pg_advisory_xact_lock(k)) FROM generate_series(1, 9) k", true},
		{"SELECT pg_try_advisory_xact_lock(k) FROM generate_series(1, 9) k UNION SELECT true", true},
		{"SELECT count(*) FROM (SELECT pg_try_advisory_xact_lock(k) ok FROM generate_series(1, 9) k) s WHERE ok", true},
		{"SELECT a FROM generate_series(1, 3) a JOIN generate_series(1, 3) b ON pg_try_advisory_xact_lock(a, b) AND a + b = 4", true},
		{"SELECT k FROM (VALUES (1), (2), (3)) v(k) WHERE pg_try_advisory_xact_lock(k) AND k % 2 = 0", true},
	} {
		if err := c.exec("BEGIN"); err != nil {
			t.Fatal(err)
		}
		res := c.conn.ExecParams(context.Background(), tt.text, nil, nil, nil, nil).Read()
		locks := len(c.locks())
		if err := c.exec("ROLLBACK"); err != nil || res.Err != nil {
			t.Fatal(tt.text, err, res.Err)
		}
		if st := c.r.Parse(tt.text, true); st.PerRow != tt.perRow || (locks > len(res.Rows)) != tt.perRow || locks == 0 {
			t.Errorf("%s: per row %v, %d rows, %d locks", tt.text, st.PerRow, len(res.Rows), locks)
		}
	}
}

var soup = flag.Int("soup", 3000, "texts that TestCorpusSoup makes")

// TestCorpusSoup: texts of quotes, comments and calls in random order. What the server accepts it must have read as we
// did: each call that is in no string takes its lock, and no other.
func TestCorpusSoup(t *testing.T) {
	c := newCorpus(t)
	before := c.hold()
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 1))
	pieces := []string{"'a'", "'a''b'", "''", "''''", "E'a\\'b'", "E'\\\\'", "e'a''\\''", "'a\\'", "U&'\\0061'", "U&'d!0061' UESCAPE '!'", "B'01'", "X'1F'", "N'a'",
		"$$a$$", "$$'$$", "$a$ $$ $a$", "$a$'$a$", "$é$\"$é$", "'$$'", "'--'", "'/*'", `'"'`, "$$--$$", "1", "-1", ".5", "1e5", "1.5", "1 +-- '\n 2", "1 */* ' */ 2",
		"2 - -1", "2 --\n -1", "1/* /* ' */ \" */", "1 -- $$\n", "1 = 2", "1 <= -1", "'a'\n'b'", "'a' -- '\n 'b'", "'a' /* */ || 'b'", "1::int", "'1'::int", "CAST('a' AS text)",
		"1 AS \"'\"", "1 AS \"a\"\"b\"", "1 AS \"--\"", "1 AS \"/*\"", "1 AS u&\"\\0061\"", "1 AS a$b$c", "1 AS a$$", "1 AS é", "1 \"$$\"", "(1)", "((1))", "'a' || $$b$$", "1 % 2", "1 != 2",
		"@ -1", "!!'a'::tsquery", "ARRAY[1]", "(ARRAY[1])[1]", "array[1] || 2"}
	separators := []string{", ", ",", ",--'\n", ",/*'*/", "; SELECT ", ";SELECT--\n", " UNION ALL SELECT "}
	const cut = "'\"$/*-\\\n;(eEuU&"
	for i := range *soup {
		if i == *soup*2/3 {
			c.off = true
			if err := c.exec("SET standard_conforming_strings = off; SET escape_string_warning = off"); err != nil {
				t.Fatal(err)
			}
		}
		text := "SELECT "
		for j := range 1 + rng.IntN(6) {
			if j > 0 {
				text += separators[rng.IntN(len(separators))]
			}
			piece := pieces[rng.IntN(len(pieces))]
			call := fmt.Sprintf("pg_try_advisory_xact_lock(%d)", i*10+j)
			switch rng.IntN(4) {
			case 0:
				piece = call
			case 1: // in the midst of the piece, so most often in a string
				at := rng.IntN(len(piece) + 1)
				piece = piece[:at] + call + piece[at:]
			case 2:
				piece += " /* " + call + " */"
			}
			text += piece
		}
		if rng.IntN(3) == 0 { // one byte more or less turns it inside out
			at := len("SELECT ") + rng.IntN(len(text)-len("SELECT "))
			if rng.IntN(2) == 0 {
				text = text[:at] + text[at+1:]
			} else {
				text = text[:at] + string(cut[rng.IntN(len(cut))]) + text[at:]
			}
		}
		st, _, err := c.run(text, before)
		if err == nil {
			c.compareCalls(text, st)
		}
	}
	t.Logf("seed %d: %d texts, %d accepted", seed, c.all, c.ran)
	if c.ran < c.all/4 {
		t.Error("too few are SQL")
	}
}

// compareCalls runs a text once more and compares the keys locked with the calls found. All are of one function.
func (c *corpus) compareCalls(text string, st *locksql.Statement) {
	if err := c.exec("BEGIN"); err != nil {
		c.t.Fatal(err)
	}
	if err := c.exec(text); err != nil {
		c.t.Fatal(err)
	}
	seen := c.locks()
	if err := c.exec("ROLLBACK"); err != nil {
		c.t.Fatal(err)
	}
	found := []string{}
	for _, call := range st.Calls {
		key := call.Key(nil)
		if key.Kind != locksql.KeyNumber {
			return // an operator got into it
		}
		found = append(found, key.String()+" ExclusiveLock")
	}
	slices.Sort(found)
	if found = slices.Compact(found); !slices.Equal(found, seen) {
		c.t.Errorf("%s\nfound %q\nseen  %q", text, found, seen)
	}
}
