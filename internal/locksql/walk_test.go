package locksql

import (
	"strings"
	"testing"
)

const (
	opaque1 = "opaque, session; pg_advisory_lock bigint 1"
	perRow1 = "opaque, session, per row; pg_advisory_lock bigint 1"
)

func TestOpaque(t *testing.T) {
	r := New(nil)
	for _, tt := range []struct{ text, want string }{
		// Almost plain.
		{"SELECT (pg_advisory_lock(1))", opaque1},
		{"SELECT pg_advisory_lock(1)::text", opaque1},
		{"SELECT pg_advisory_lock(1), 1", opaque1},
		{"SELECT 1, pg_advisory_lock(1)", opaque1},
		{"SELECT ALL pg_advisory_lock(1)", opaque1},
		{"SELECT DISTINCT pg_advisory_lock(1)", opaque1},
		{"SELECT pg_try_advisory_lock(1) IS NULL", "opaque, session; pg_try_advisory_lock bigint 1"},
		{"SELECT pg_try_advisory_lock(1) isnull", "opaque, session; pg_try_advisory_lock bigint 1"},
		{"SELECT pg_try_advisory_lock(1) NotNull", "opaque, session; pg_try_advisory_lock bigint 1"},
		{"SELECT pg_try_advisory_lock(1) AS isnull", "opaque, session; pg_try_advisory_lock bigint 1"},
		{"SELECT NOT pg_try_advisory_lock(1)", "opaque, session; pg_try_advisory_lock bigint 1"},
		{"SELECT pg_advisory_lock(1) LIMIT 0", opaque1},
		{"SELECT pg_advisory_lock(1) WHERE true", opaque1},
		{"SELECT pg_advisory_lock(1) UNION ALL SELECT pg_advisory_lock(1)", opaque1 + "; pg_advisory_lock bigint 1"},
		{"SELECT pg_advisory_lock(1) AS", opaque1},
		{"SELECT pg_advisory_lock(1) AS 'a'", opaque1},
		{"SELECT pg_advisory_lock(1), ", opaque1},
		{"SELECT pg_advisory_lock(1) a b", opaque1},
		{"SELECT pg_advisory_lock(1) OVER ()", opaque1},
		{"SELECT pg_advisory_lock(1) FILTER (WHERE true)", opaque1},
		{"SELECT pg_advisory_lock(key => 1)", "opaque, session; pg_advisory_lock bigint key => 1"},
		{"SELECT pg_advisory_lock(VARIADIC ARRAY[1])", "opaque, session; pg_advisory_lock bigint variadic array[1]"},
		{"SELECT pg_advisory_lock(DISTINCT 1)", "opaque, session; pg_advisory_lock bigint distinct 1"},
		{"SELECT pg_advisory_lock(1 ORDER BY 1)", "opaque, session; pg_advisory_lock bigint 1 order by 1"},
		{"SELECT pg_advisory_lock(abs(1))", "opaque, session; pg_advisory_lock bigint abs(1)"},
		{"SELECT pg_advisory_lock(x.hashtext(1))", "opaque, session; pg_advisory_lock bigint x.hashtext(1)"},
		{"SELECT pg_advisory_lock(id)", "opaque, session; pg_advisory_lock bigint id"},
		{"SELECT pg_advisory_lock(hashtext(name))", "opaque, session; pg_advisory_lock bigint hashtext(name) weak"},
		{"SELECT pg_advisory_lock(hashtext(current_user))", "opaque, session; pg_advisory_lock bigint hashtext(current_user) weak"},
		{"SELECT pg_advisory_lock((SELECT 1))", "opaque, session; pg_advisory_lock bigint (select 1)"},
		{"SELECT pg_advisory_lock((ARRAY[1])[1])", "opaque, session; pg_advisory_lock bigint (array[1])[1]"},
		{"SELECT pg_advisory_lock(true::int)", "opaque, session; pg_advisory_lock bigint true::int"},
		{"SELECT pg_advisory_lock(N'1')", "plain, session; pg_advisory_lock bigint n '…'"},
		{"SELECT pg_advisory_lock($0)", "opaque, session; pg_advisory_lock bigint $0"},
		{"SELECT pg_advisory_lock($99999)", "opaque, session; pg_advisory_lock bigint $99999"},
		{"SELECT pg_advisory_lock(1 .. 2)", "opaque, session; pg_advisory_lock bigint 1 .. 2"},
		{"SELECT pg_advisory_lock(1 := 2)", "opaque, session; pg_advisory_lock bigint 1 := 2"},
		{"SELECT pg_advisory_lock(1 => 2)", "opaque, session; pg_advisory_lock bigint 1 => 2"},
		{"SELECT pg_advisory_lock(x.'42')", "opaque, session; pg_advisory_lock bigint x.'…'"},
		{"SELECT pg_advisory_lock(CAST(1 AS ))", "opaque, session; pg_advisory_lock bigint cast(1 as)"},
		{"SELECT pg_advisory_lock(x.+1)", "opaque, session; pg_advisory_lock bigint x.+ 1"},
		{"SELECT pg_advisory_lock(1::)", "opaque, session; pg_advisory_lock bigint 1::"},
		{`SELECT pg_advisory_lock(1::"double" precision)`, `opaque, session; pg_advisory_lock bigint 1::"double" precision`},
		{`SELECT pg_advisory_lock(1::"character" varying)`, `opaque, session; pg_advisory_lock bigint 1::"character" varying`},
		{`SELECT pg_advisory_lock(1::"bit" varying)`, `opaque, session; pg_advisory_lock bigint 1::"bit" varying`},
		{"SELECT pg_advisory_lock('hashtext'(1))", "opaque, session; pg_advisory_lock bigint '…' (1)"},
		{"SELECT pg_advisory_lock(1 2)", "opaque, session; pg_advisory_lock bigint 1 2"},
		{"SELECT pg_advisory_lock(CAST(1 AS int)", "opaque, session; pg_advisory_lock bigint cast(1 as int)"},
		{"SELECT pg_advisory_lock(CAST(1, int))", "opaque, session; pg_advisory_lock bigint cast(1, int)"},
		{"SELECT pg_advisory_lock(1::int[])", "opaque, session; pg_advisory_lock bigint 1::int[]"},
		{"SELECT pg_advisory_lock(1::a.b.c)", "opaque, session; pg_advisory_lock bigint 1::a.b.c"},
		{"SELECT pg_advisory_lock(7, id)", "opaque, session; pg_advisory_lock int,int (7, id)"},
		{"SELECT pg_advisory_lock(id, f(1, 2))", "opaque, session; pg_advisory_lock int,int (id, f(1, 2))"},
		{"SELECT pg_advisory_lock()", "opaque, session; pg_advisory_lock bigint "},
		{"SELECT pg_advisory_lock(1, 2, 3)", "opaque, session; pg_advisory_lock int,int "},
		{"SELECT pg_advisory_unlock_all(1)", "opaque, session; pg_advisory_unlock_all"},
		{"SELECT * FROM pg_advisory_lock(1)", opaque1},
		{"(SELECT pg_advisory_lock(1))", opaque1},
		{"; SELECT pg_advisory_lock(1)", opaque1},
		{"SELECT pg_advisory_lock(1); SELECT 2", opaque1},
		{"VALUES (pg_advisory_lock(1))", opaque1},
		{"WITH a AS (SELECT 1) SELECT pg_advisory_lock(1)", opaque1},
		{"WITH a AS (SELECT pg_advisory_lock(1)) SELECT 1", opaque1},
		{"SELECT 1 LIMIT pg_advisory_lock(1)", opaque1},

		// Names.
		{"SELECT myschema.pg_advisory_xact_lock(1)", "opaque, session"},
		{"SELECT mydb.pg_catalog.pg_advisory_xact_lock(1)", "opaque, session"},
		{`SELECT "PG_CATALOG".pg_advisory_xact_lock(1)`, "opaque, session"},
		{"SELECT pg_catalog.pg_advisory_xact_lock(1) FROM x", "opaque, per row; pg_advisory_xact_lock bigint 1"},
		{"SELECT pg_advisory_lock", "no call"},
		{"SELECT pg_advisory_lock FROM pg_advisory_lock AS pg_advisory_lock", "no call"},
		{"SELECT 1 AS pg_advisory_lock", "no call"},
		{"SELECT 'pg_advisory_lock(1)'", "no call"},
		{"SELECT $$pg_advisory_lock(1)$$, $a$SELECT pg_advisory_lock(1)$a$", "no call"},
		{"SELECT E'\\'pg_advisory_lock(1)', U&'''pg_advisory_lock(1)', b'pg_advisory_lock(1)'", "no call"},
		{"SELECT 1 -- pg_advisory_lock(1)", "no call"},
		{"SELECT 1 /* pg_advisory_lock(1) /* */ pg_advisory_lock(1) */", "no call"},
		{`SELECT "pg_advisory_lock(1)"`, "no call"},
		{"SELECT t.pg_advisory_lock FROM t", "no call"},
		{"SELECT pg_advisory_lock(1) FROM t", perRow1},
		{"SELECT xpg_advisory_lock(1), pg_advisory_lockx(1), pg_advisory_lock$(1), \u00e4pg_advisory_lock(1)", "no call"},
		{"SELECT 'advisory', advisory(1)", "no call"},
		{"INSERT INTO pg_advisory_lock (id) VALUES (1)", "no call"},
		{"INSERT INTO public.pg_advisory_lock (id) VALUES (1)", "no call"},
		{"MERGE INTO pg_advisory_lock (id)", "no call"},
		{"SELECT * FROM t AS pg_advisory_lock (a)", "no call"},
		{"WITH pg_advisory_lock (a) AS (SELECT 1) SELECT 2", "no call"},
		{"WITH RECURSIVE pg_advisory_lock (a) AS (SELECT 1) SELECT 2", "no call"},
		{"CREATE TABLE pg_advisory_lock (id int)", "no call"},
		{"CREATE TABLE IF NOT EXISTS pg_advisory_lock (id int)", "no call"},
		{"CREATE TABLE t (id int REFERENCES pg_advisory_lock (id))", "no call"},
		{"COPY pg_advisory_lock (id) FROM STDIN", "no call"},

		// Everything else that is executed.
		{"UPDATE t SET a = 1 WHERE pg_advisory_lock(1) IS NULL", perRow1},
		{"DELETE FROM t WHERE pg_advisory_lock(1) IS NULL", perRow1},
		{"INSERT INTO t VALUES (1) RETURNING pg_advisory_lock(1)", opaque1},
		{"INSERT INTO t SELECT pg_advisory_lock(1)", opaque1},
		{"COPY (SELECT pg_advisory_lock(1)) TO STDOUT", opaque1},
		{"CREATE TABLE t AS SELECT pg_advisory_lock(1)", opaque1},
		{"CREATE TABLE t AS SELECT pg_advisory_lock(1) WITH DATA", opaque1},
		{"CREATE TEMP TABLE t AS SELECT pg_advisory_lock(1) WITH NO DATA", "no call"},
		{"SELECT pg_advisory_lock(1) INTO t", opaque1},
		{"CREATE MATERIALIZED VIEW v AS SELECT pg_advisory_lock(1)", opaque1},
		{"CREATE MATERIALIZED VIEW v AS SELECT pg_advisory_lock(1) WITH NO DATA;", "no call"},
		{"CREATE UNLOGGED TABLE t AS SELECT pg_advisory_lock(1); SELECT 1 WITH NO DATA", opaque1},
		{"ALTER TABLE t ADD COLUMN c text DEFAULT pg_advisory_lock(1)::text", opaque1},
		{"CREATE INDEX ON t (pg_advisory_lock(1))", opaque1},
		{"CALL p(1) -- advisory", "opaque, session"},
		{"CALL s.p() /* advisory */", "opaque, session"},
		{"SELECT 1; CALL p(1) -- advisory", "opaque, session"},
		{"CREATE SCHEMA view CREATE TABLE t PARTITION OF p FOR VALUES IN (pg_advisory_lock(1))", opaque1},

		// Deferred.
		{"DECLARE c CURSOR FOR SELECT pg_advisory_lock(1)", "opaque, session, deferred; pg_advisory_lock bigint 1"},
		{"DECLARE c CURSOR WITH HOLD FOR SELECT pg_advisory_xact_lock(1)", "opaque, deferred; pg_advisory_xact_lock bigint 1"},
		{"DECLARE c CURSOR FOR SELECT 'advisory'", "no call"},

		// EXPLAIN.
		{"EXPLAIN SELECT pg_advisory_lock(1)", "no call"},
		{"EXPLAIN VERBOSE SELECT pg_advisory_lock(1)", "no call"},
		{"EXPLAIN ANALYZE SELECT pg_advisory_lock(1)", opaque1},
		{"explain analyse verbose select pg_advisory_lock(1)", opaque1},
		{"EXPLAIN (ANALYZE) SELECT pg_advisory_lock(1)", opaque1},
		{"EXPLAIN (ANALYSE, COSTS OFF) SELECT pg_advisory_lock(1)", opaque1},
		{"EXPLAIN (COSTS OFF, ANALYZE) SELECT pg_advisory_lock(1)", opaque1},
		{"EXPLAIN (VERBOSE, FORMAT JSON) SELECT pg_advisory_lock(1)", "no call"},
		{"EXPLAIN (ANALYZE on) SELECT pg_advisory_lock(1)", opaque1},
		{"EXPLAIN (ANALYZE true) SELECT pg_advisory_lock(1)", opaque1},
		{"EXPLAIN (ANALYZE yes) SELECT pg_advisory_lock(1)", opaque1}, // refused
		{"EXPLAIN (ANALYZE 1) SELECT pg_advisory_lock(1)", opaque1},
		{"EXPLAIN (ANALYZE 'on') SELECT pg_advisory_lock(1)", opaque1},
		{"EXPLAIN (ANALYZE off) SELECT pg_advisory_lock(1)", "no call"},
		{"EXPLAIN (ANALYZE False) SELECT pg_advisory_lock(1)", "no call"},
		{"EXPLAIN (ANALYZE 0, VERBOSE) SELECT pg_advisory_lock(1)", "no call"},
		{"EXPLAIN (ANALYZE 'OFF') SELECT pg_advisory_lock(1)", "no call"},
		{`EXPLAIN (ANALYZE "false") SELECT pg_advisory_lock(1)`, "no call"},
		{"EXPLAIN (ANALYZE off, ANALYZE) SELECT pg_advisory_lock(1)", opaque1},
		{"EXPLAIN (ANALYZE, ANALYZE off) SELECT pg_advisory_lock(1)", "no call"},
		{`EXPLAIN ("analyze") SELECT pg_advisory_lock(1)`, opaque1},
		{`EXPLAIN (U&"\0061nalyze" on) SELECT pg_advisory_lock(1)`, opaque1},
		{"EXPLAIN (BUFFERS -0, ANALYZE +1) SELECT pg_advisory_lock(1)", opaque1},
		{"EXPLAIN (ANALYZE -0) SELECT pg_advisory_lock(1)", "no call"},
		{"EXPLAIN (ANALYZE; SELECT pg_advisory_lock(1)", opaque1},
		{"EXPLAIN (SELECT pg_advisory_lock(1))", "no call"},
		{"EXPLAIN ((SELECT pg_advisory_lock(1)))", "no call"},
		{"EXPLAIN (VALUES (pg_advisory_lock(1)))", "no call"},
		{"EXPLAIN (WITH analyze AS (SELECT pg_advisory_lock(1)) SELECT 1)", "no call"},
		{"EXPLAIN ANALYZE (SELECT pg_advisory_lock(1))", opaque1},
		{"EXPLAIN (ANALYZE) CREATE TABLE t AS SELECT pg_advisory_lock(1)", opaque1},
		{"EXPLAIN CREATE TABLE t AS SELECT pg_advisory_lock(1)", "no call"},
		{"EXPLAIN ANALYZE CREATE TABLE t AS SELECT pg_advisory_lock(1) WITH NO DATA", "no call"},
		{"EXPLAIN ANALYZE DECLARE c CURSOR FOR SELECT pg_advisory_lock(1)", opaque1},
		{"EXPLAIN SELECT pg_advisory_lock(1); SELECT pg_advisory_xact_lock(2)", "opaque; pg_advisory_xact_lock bigint 2"},

		// PREPARE and EXECUTE.
		{"PREPARE p AS SELECT pg_advisory_lock(1)", "no call; PREPARE p locks session"},
		{"PREPARE P (bigint, int) AS SELECT pg_advisory_xact_lock($1)", "no call; PREPARE p locks"},
		{`PREPARE "P" AS SELECT 'pg_advisory_xact_lock(1)'`, "no call; PREPARE P"},
		{"PREPARE p AS SELECT pg_advisory_lock(1); EXECUTE p", "no call; PREPARE p locks session; EXECUTE p"},
		{"EXECUTE p(pg_advisory_lock(1))", opaque1 + "; EXECUTE p"},
		{"EXPLAIN EXECUTE p(pg_advisory_lock(1))", opaque1},
		{"EXPLAIN ANALYZE EXECUTE p(pg_advisory_lock(1))", opaque1 + "; EXECUTE p"},
		{"CREATE TABLE t AS EXECUTE p(pg_advisory_lock(1))", opaque1 + "; EXECUTE p"},
		{"CREATE TABLE t AS EXECUTE p(pg_advisory_lock(1)) WITH NO DATA", opaque1 + "; EXECUTE p"},
		{"EXPLAIN CREATE TABLE t AS EXECUTE p(pg_advisory_lock(1))", opaque1},
		{"EXPLAIN (ANALYZE) CREATE TABLE t AS EXECUTE p(pg_advisory_lock(1))", opaque1 + "; EXECUTE p"},

		// Definitions.
		{"CREATE FUNCTION f() RETURNS void LANGUAGE sql AS 'SELECT pg_advisory_lock(1)'", "no call"},
		{"CREATE FUNCTION pg_advisory_lock(text) RETURNS void LANGUAGE sql AS ''", "no call"},
		{"CREATE OR REPLACE FUNCTION f(a bigint DEFAULT pg_advisory_lock(1)) RETURNS void LANGUAGE sql AS ''", "no call"},
		{"CREATE PROCEDURE p() BEGIN ATOMIC SELECT pg_advisory_lock(1); SELECT CASE WHEN true THEN 1 END; SELECT 2; END", "no call"},
		{"CREATE FUNCTION f() RETURNS void BEGIN ATOMIC SELECT pg_advisory_lock(1); END; SELECT pg_advisory_xact_lock(2)", "opaque; pg_advisory_xact_lock bigint 2"},
		{"CREATE FUNCTION f() RETURNS void BEGIN ATOMIC END; SELECT pg_advisory_xact_lock(2)", "opaque; pg_advisory_xact_lock bigint 2"},
		{"CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT 1 AS case; SELECT 2 AS begin; END; SELECT pg_advisory_xact_lock(2); END", "opaque; pg_advisory_xact_lock bigint 2; COMMIT"},
		{"CREATE FUNCTION f(begin atomic) RETURNS atomic LANGUAGE sql AS ''; SELECT pg_advisory_xact_lock(2)", "opaque; pg_advisory_xact_lock bigint 2"},
		{"CREATE FUNCTION begin() RETURNS int LANGUAGE sql AS ''; SELECT pg_advisory_xact_lock(2)", "opaque; pg_advisory_xact_lock bigint 2"},
		{"CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT (pg_advisory_lock(1)); SELECT 1 ORDER BY 1; END;", "no call"},
		{"CREATE TRIGGER t BEFORE INSERT ON a WHEN (pg_advisory_lock(1) IS NULL) EXECUTE FUNCTION f()", "no call"},
		{"CREATE CONSTRAINT TRIGGER t AFTER INSERT ON a EXECUTE FUNCTION pg_advisory_lock()", "no call"},
		{"CREATE OR REPLACE TEMP VIEW v AS SELECT pg_advisory_lock(1)", "no call"},
		{"CREATE LOCAL TEMPORARY RECURSIVE VIEW v (a) AS SELECT pg_advisory_lock(1)", "no call"},
		{"CREATE RULE r AS ON INSERT TO t DO (SELECT pg_advisory_lock(1); SELECT 2)", "no call"},
		{"CREATE EVENT TRIGGER e ON ddl_command_start EXECUTE FUNCTION pg_advisory_lock()", "no call"},
		{"CREATE POLICY p ON t USING (pg_advisory_lock(1) IS NULL)", "no call"},
		{"CREATE AGGREGATE a (int) (SFUNC = pg_advisory_lock(1))", "no call"},
		{"CREATE CAST (int AS text) WITH FUNCTION pg_advisory_lock(int)", "no call"},
		{"CREATE OPERATOR CLASS o FOR TYPE int USING btree AS FUNCTION 1 pg_advisory_lock(int, int)", "no call"},
		{"COMMENT ON FUNCTION pg_advisory_lock(bigint) IS 'x'", "no call"},
		{"GRANT EXECUTE ON FUNCTION pg_advisory_lock(bigint) TO PUBLIC", "no call"},
		{"REVOKE ALL ON FUNCTION pg_catalog.pg_advisory_lock(bigint) FROM PUBLIC", "no call"},
		{"ALTER FUNCTION pg_advisory_lock(bigint) OWNER TO x", "no call"},
		{"ALTER EXTENSION e ADD FUNCTION pg_advisory_lock(bigint)", "no call"},
		{"DROP FUNCTION pg_advisory_lock(bigint)", "no call"},
		{"SECURITY LABEL ON FUNCTION pg_advisory_lock(bigint) IS 'x'", "no call"},
		{"DROP FUNCTION f(); SELECT pg_advisory_lock(1)", opaque1},

		// One statement does not hide what another does.
		{"SELECT pg_advisory_lock(1); SELECT pg_advisory_xact_lock(2)", opaque1 + "; pg_advisory_xact_lock bigint 2"},
		{"SELECT pg_advisory_lock(1) FROM t; SELECT pg_advisory_xact_lock(2)", perRow1 + "; pg_advisory_xact_lock bigint 2"},
		{"DECLARE c CURSOR FOR SELECT pg_advisory_xact_lock(1); SELECT pg_advisory_xact_lock(2)",
			"opaque, deferred; pg_advisory_xact_lock bigint 1; pg_advisory_xact_lock bigint 2"},
		{"PREPARE p AS SELECT pg_advisory_lock(1); SELECT pg_advisory_xact_lock(2)", "opaque; pg_advisory_xact_lock bigint 2; PREPARE p locks session"},

		// DO.
		{"DO $$ BEGIN PERFORM pg_advisory_lock(1); END $$", opaque1},
		{"DO LANGUAGE plpgsql $$ BEGIN PERFORM pg_advisory_xact_lock(1); END $$", "opaque; pg_advisory_xact_lock bigint 1"},
		{"DO 'BEGIN PERFORM pg_advisory_xact_lock(1); END' LANGUAGE 'plpgsql'", "opaque; pg_advisory_xact_lock bigint 1"},
		{"DO E'BEGIN PERFORM pg_advisory_xact\\x5flock(1); END'", "opaque; pg_advisory_xact_lock bigint 1"},
		{"DO 'BEGIN RAISE NOTICE ''--''; PERFORM pg_advisory_xact_lock(1); END'", "opaque; pg_advisory_xact_lock bigint 1"},
		{"DO $$ BEGIN -- pg_advisory_lock(1)\n END $$", "no call"},
		{"DO $$ BEGIN RAISE NOTICE 'pg_advisory_lock'; END $$", "no call"},
		{"DO $$ BEGIN EXECUTE 'SELECT pg_advisory_xact_lock(1)'; END $$", "opaque; pg_advisory_xact_lock bigint 1"},
		{"DO $$ BEGIN EXECUTE 'SELECT pg_advisory_lock' || '(1)'; END $$", "opaque, session"},
		{"DO $$ BEGIN EXECUTE 'SELECT pg_advisory_' || 'lock(1)'; END $$", "opaque, session"},
		{"DO $$ BEGIN EXECUTE format('SELECT %I(1)', 'pg_advisory_xact_lock'); END $$", "opaque"},
		{"DO $$ BEGIN EXECUTE $q$DO 'BEGIN PERFORM pg_advisory_xact_lock(1); END'$q$; END $$", "opaque; pg_advisory_xact_lock bigint 1"},
		{"DO $$ BEGIN EXECUTE 'DO ''BEGIN EXECUTE ''''SELECT pg_advisory_xact_lock(1)''''; END'''; END $$", "opaque; pg_advisory_xact_lock bigint 1"},
		{"DO $a$ $b$ $c$ $d$ $e$ pg_advisory_xact_lock(1) $e$ $d$ $c$ $b$ $a$", "opaque"},
		{"DO $a$ $b$ $c$ $d$ $e$ pg_advisory_lock(1) $e$ $d$ $c$ $b$ $a$", "opaque, session"},
		{"DO LANGUAGE plpython3u $$ plpy.execute(\"SELECT pg_advisory_lock(1)\") $$", "opaque, session"},
		{"DO LANGUAGE plpython3u $$ plpy.execute(\"SELECT pg_advisory_xact_lock(1)\") # $$", "opaque"},
		{"DO LANGUAGE plperl 'pg_advisory_xact_lock advisory'", "opaque, session"},
		{"DO $$ BEGIN CALL p(1); PERFORM 'advisory'; END $$", "opaque, session"},
		{"DO $$ BEGIN PERFORM pg_advisory_xact_lock(id) FROM t; END $$", "opaque, per row; pg_advisory_xact_lock bigint id"},
		{"DO $$ BEGIN PERFORM pg_advisory_xact_lock(id) FROM t; PERFORM pg_advisory_xact_lock(1); END $$",
			"opaque, per row; pg_advisory_xact_lock bigint id; pg_advisory_xact_lock bigint 1"},
		{"DO $$ BEGIN EXECUTE 'SELECT pg_advisory_xact_lock(id) FROM t'; END $$", "opaque, per row; pg_advisory_xact_lock bigint id"},
		{"DO $$ BEGIN PERFORM 1 FROM t; PERFORM pg_advisory_xact_lock(1); END $$", "opaque; pg_advisory_xact_lock bigint 1"},
		{"DO $$ pg_advisory_xact_lock('unterminated $$", "opaque; pg_advisory_xact_lock bigint "},
		{"DO $$ BEGIN END $$; SELECT pg_advisory_xact_lock(1)", "opaque; pg_advisory_xact_lock bigint 1"},
		{"DO $$ $$ -- advisory", "no call"},
		{"DO -- advisory", "no call"},
		{"DO LANGUAGE plpgsql -- advisory", "no call"},
		{"DO LANGUAGE plpgsql; SELECT pg_advisory_xact_lock(1)", "opaque; pg_advisory_xact_lock bigint 1"},
		{"DO $$ BEGIN PERFORM pg_advisory_xact_lock(1) -- \" $$ LANGUAGE \"plpgsql\"", "opaque; pg_advisory_xact_lock bigint 1"},
		{"DO $$ BEGIN EXECUTE 'CALL p(1)'; END $$ -- advisory", "opaque, session"},
		{"DO U&'\\D8 advisory'", "opaque, session"},

		// What does not end.
		{"SELECT 'pg_advisory_lock(1)", "opaque, session"},
		{"SELECT pg_advisory_xact_lock(1) /*", "opaque; pg_advisory_xact_lock bigint 1"},
		{"SELECT \"pg_advisory_lock", "opaque, session"},
		{"SELECT $$pg_advisory_lock", "opaque, session"},
		{"SELECT pg_advisory_lock(1", opaque1},
		{"EXPLAIN (ANALYZE pg_advisory_lock", "no call"},
		{"EXPLAIN (ANALYZE 'pg_advisory_lock", "opaque, session"},
		{"EXPLAIN (ANALYZE", "no call"},
		{"SELECT pg_advisory_lock(1 + /*", "opaque, session; pg_advisory_lock bigint 1 +"},
		{"SELECT /* advisory */ pg_catalog.", "no call"},
		{"SELECT /* advisory */ pg_catalog.(1)", "no call"},
		{"SELECT /* advisory */ 1::pg_catalog.", "no call"},
		{"SELECT pg_advisory_lock(1::x.", "opaque, session; pg_advisory_lock bigint 1::x."},
		{"SELECT pg_advisory_lock(", "opaque, session; pg_advisory_lock bigint "},
		{"SELECT ) ) pg_advisory_lock(1)", opaque1},
		{"SELECT 1 $ pg_advisory_lock(1)", opaque1},
		{"SELECT 1 \x00 pg_advisory_lock(1)", opaque1},
		{"SELECT 1 {\\} pg_advisory_lock(1)", opaque1},
	} {
		if got := describe(r.Parse(tt.text, true)); got != tt.want {
			t.Errorf("%s\n got %s\nwant %s", tt.text, got, tt.want)
		}
	}
}

// TestDefinitions: names before a parenthesis are signatures, or are kept for later.
func TestDefinitions(t *testing.T) {
	for verb, kinds := range map[string]string{
		"CREATE": "AGGREGATE CAST CONVERSION EVENT FUNCTION LANGUAGE OPERATOR POLICY PROCEDURE RULE TRANSFORM TRIGGER VIEW",
		"ALTER":  "AGGREGATE DEFAULT EVENT EXTENSION FUNCTION OPERATOR POLICY PROCEDURE ROUTINE RULE TRIGGER VIEW",
		"DROP":   "ANYTHING", "GRANT": "ANYTHING", "REVOKE": "ANYTHING", "COMMENT": "ANYTHING", "SECURITY": "LABEL",
		"CREATE OR REPLACE": "FUNCTION", "CREATE TEMP": "VIEW", "CREATE TEMPORARY": "VIEW", "CREATE LOCAL TEMP": "VIEW", "CREATE GLOBAL TEMP": "VIEW",
		"CREATE UNLOGGED": "VIEW", "CREATE RECURSIVE": "VIEW", "CREATE CONSTRAINT": "TRIGGER", "CREATE TRUSTED PROCEDURAL": "LANGUAGE",
	} {
		for _, kind := range strings.Fields(kinds) {
			text := verb + " " + kind + " x pg_advisory_lock(bigint)"
			if st := New(nil).Parse(text, true); st.Form != NoCall {
				t.Errorf("%s: %s", text, describe(st))
			}
		}
	}
	for _, text := range []string{"CREATE INDEX x ON view (pg_advisory_lock(1))", "ALTER TABLE view ALTER x SET DEFAULT pg_advisory_lock(1)", "CREATE x VIEW pg_advisory_lock(1)"} {
		if st := New(nil).Parse(text, true); st.Form != Opaque {
			t.Errorf("%s: %s", text, describe(st))
		}
	}
}

// TestPerRow: a lock function is told off where it may lock for rows that are not returned. Rows that the statement
// makes itself, by a function or VALUES, are the program's choice, so these count only where something drops some.
func TestPerRow(t *testing.T) {
	r := New([]string{"take_lock"})
	for _, text := range []string{
		"SELECT id FROM t WHERE pg_try_advisory_lock(7, id) LIMIT 2",
		"SELECT pg_try_advisory_lock(id) FROM t",
		"SELECT pg_try_advisory_lock(1) FROM only s.t AS x, u",
		"SELECT id FROM t JOIN u ON pg_try_advisory_lock(id)",
		"SELECT id FROM (t JOIN u ON pg_try_advisory_lock(id))",
		"SELECT pg_try_advisory_lock(id) FROM (t JOIN u USING (id))",
		"SELECT id FROM t, pg_try_advisory_lock(t.id)",
		"SELECT id FROM pg_try_advisory_lock(1), t WHERE pg_try_advisory_lock(1)",
		"SELECT id FROM t CROSS JOIN LATERAL pg_try_advisory_lock(t.id)",
		"SELECT id FROM t, LATERAL (SELECT pg_try_advisory_lock(t.id)) x",
		"SELECT pg_try_advisory_lock(id) FROM (SELECT id FROM t ORDER BY id) s",
		"SELECT * FROM (SELECT pg_try_advisory_lock(id) FROM t) s",
		"SELECT (SELECT pg_try_advisory_lock(t.id)) FROM t",
		"SELECT id FROM t WHERE EXISTS (SELECT 1 WHERE pg_try_advisory_lock(t.id))",
		"SELECT id FROM t WHERE (((pg_try_advisory_lock(1))))",
		"SELECT id FROM t ORDER BY coalesce(pg_try_advisory_lock(1))",
		"SELECT i FROM generate_series(1, 10) i WHERE pg_try_advisory_lock(i)",
		"SELECT pg_try_advisory_lock(1) FROM generate_series(1, 10) i WHERE i > 2",
		"SELECT pg_try_advisory_lock(i) FROM ROWS FROM (unnest($1::int[])) i LIMIT 1",
		"SELECT pg_try_advisory_lock(i) FROM unnest($1::int[]) i ORDER BY 1 DESC LIMIT 1",
		"SELECT pg_try_advisory_lock(i) FROM unnest($1::int[]) i OFFSET 1",
		"SELECT pg_try_advisory_lock(i) FROM unnest($1::int[]) i FETCH FIRST ROW ONLY",
		"SELECT pg_try_advisory_lock(i) FROM unnest($1::int[]) i WHERE i > 2 ORDER BY i",
		"SELECT pg_try_advisory_lock(i) FROM unnest($1::int[]) i, now() x LIMIT 1",
		"SELECT DISTINCT pg_try_advisory_lock(i) FROM unnest($1::int[]) i",
		"SELECT DISTINCT pg_try_advisory_lock(i) FROM unnest($1::int[]) i CROSS JOIN unnest($2::int[]) j",
		"SELECT DISTINCT ON (i) pg_try_advisory_lock(i) FROM unnest($1::int[]) i",
		"SELECT count(pg_try_advisory_lock(i)) FROM unnest($1::int[]) i",
		"SELECT count(*) FILTER (WHERE pg_try_advisory_lock(i)) FROM unnest($1::int[]) i",
		"SELECT bool_and(pg_try_advisory_lock(1)) FROM unnest($1::int[]) i",
		"SELECT pg_try_advisory_lock(i) FROM unnest($1::int[]) i GROUP BY i",
		"SELECT 1 FROM unnest($1::int[]) i HAVING pg_try_advisory_lock(1)",
		"SELECT pg_try_advisory_lock(i) FROM unnest($1::int[]) i JOIN t ON t.id = i",
		"SELECT pg_try_advisory_lock(i) FROM unnest($1::int[]) i LEFT JOIN unnest($2::int[]) j ON i = j",
		"SELECT pg_try_advisory_lock(i) FROM unnest($1::int[]) i, t",
		"SELECT i FROM (unnest($1::int[]) i JOIN unnest($2::int[]) j ON pg_try_advisory_lock(i))",
		"SELECT pg_try_advisory_lock(i) FROM unnest($1::int[]) i UNION SELECT true",
		"SELECT true UNION SELECT pg_try_advisory_lock(i) FROM unnest($1::int[]) i",
		"SELECT pg_try_advisory_lock(i) FROM unnest($1::int[]) i INTERSECT ALL SELECT true",
		"SELECT pg_try_advisory_lock(i) FROM unnest($1::int[]) i EXCEPT SELECT true",
		"SELECT * FROM (SELECT pg_try_advisory_lock(i) ok FROM unnest($1::int[]) i) s WHERE ok LIMIT 1",
		"WITH s AS (SELECT pg_try_advisory_lock(i) ok FROM unnest($1::int[]) i) SELECT 1 FROM s WHERE ok LIMIT 1",
		"SELECT 1 WHERE EXISTS (SELECT pg_try_advisory_lock(i) FROM unnest($1::int[]) i)",
		"SELECT (SELECT pg_try_advisory_lock(i)) FROM unnest($1::int[]) i",
		"SELECT * FROM t, LATERAL (SELECT pg_try_advisory_lock(i) FROM unnest(t.ids) i) s",
		"SELECT pg_try_advisory_lock(k) FROM (VALUES (1), (2)) v(k) LIMIT 1",
		"SELECT k FROM (VALUES (1), (2)) v(k) WHERE pg_try_advisory_lock(k)",
		"SELECT pg_try_advisory_lock(k) FROM (SELECT k FROM unnest($1::int[]) k ORDER BY k) s LIMIT 1",
		"SELECT pg_try_advisory_lock(k) FROM (SELECT k FROM unnest($1::int[]) k UNION SELECT 1) s LIMIT 1",
		"INSERT INTO t SELECT pg_try_advisory_lock(i) FROM unnest($1::int[]) i ON CONFLICT DO NOTHING",
		"DECLARE c CURSOR FOR SELECT pg_try_advisory_lock(i) FROM unnest($1::int[]) i",
		"DO $$ BEGIN SELECT pg_try_advisory_lock(i) INTO x FROM unnest(a) i; END $$",
		"DO $$ BEGIN FOR x IN SELECT pg_try_advisory_lock(i) FROM unnest(a) i LOOP EXIT; END LOOP; END $$",
		"DO $$ BEGIN PERFORM pg_advisory_lock(k) FROM unnest(a) k WHERE k > 1; END $$",
		"SELECT take_lock(i) FROM unnest($1::int[]) i LIMIT 1",
		"WITH x AS (SELECT 1) SELECT pg_try_advisory_lock(1) FROM x",
		"WITH x AS (SELECT pg_try_advisory_lock(id) FROM t) SELECT 1",
		"INSERT INTO u SELECT pg_try_advisory_lock(id) FROM t",
		"UPDATE t SET ok = pg_try_advisory_lock(id)",
		"DELETE FROM t USING u WHERE pg_try_advisory_lock(t.id)",
		"SELECT array_agg(pg_try_advisory_lock(1) ORDER BY 1) FROM t",
		"SELECT pg_try_advisory_lock(1) FROM t, now() x",
		"SELECT pg_try_advisory_lock(1) FROM ONLY (t)",
		"SELECT pg_try_advisory_lock(1) FROM (SELECT id FROM t UNION SELECT 1) s",
		"SELECT id FROM t WHERE EXISTS (SELECT 1 WHERE pg_try_advisory_lock(t.id) UNION SELECT 1)",
		"MERGE INTO t USING u ON pg_try_advisory_lock(t.id) WHEN MATCHED THEN DELETE",
		"MERGE INTO t USING u ON pg_try_advisory_lock(t.id) WHEN NOT MATCHED THEN DO NOTHING",
		"SELECT pg_try_advisory_lock(1) FROM now() x JOIN t ON true",
		"SELECT 1 UNION SELECT pg_try_advisory_lock(id)::int FROM t",
		"SELECT pg_try_advisory_lock(id)::int FROM t UNION SELECT 1",
		"COPY (SELECT pg_try_advisory_lock(id) FROM t) TO STDOUT",
		"DECLARE c CURSOR FOR SELECT pg_try_advisory_lock(id) FROM t",
		"EXPLAIN ANALYZE SELECT pg_try_advisory_lock(id) FROM t",
		"SELECT x.pg_advisory_lock(id) FROM t",
	} {
		if st := r.Parse(text, true); !st.PerRow || st.Form != Opaque {
			t.Errorf("not per row: %s: %s", text, describe(st))
		}
	}
	for _, text := range []string{
		"SELECT * FROM pg_try_advisory_lock($1)",
		"SELECT * FROM pg_catalog.pg_try_advisory_lock($1) AS ok",
		"SELECT * FROM ROWS FROM (pg_try_advisory_lock(1))",
		"SELECT pg_try_advisory_lock(1) WHERE true",
		"SELECT pg_try_advisory_lock(1) LIMIT 1",
		"SELECT pg_try_advisory_lock(x) FROM (VALUES (1), (2)) v(x)",
		"SELECT pg_try_advisory_lock(x) FROM current_setting('a') x",
		"SELECT pg_try_advisory_lock(x) FROM (SELECT 1 AS x) s",
		"SELECT * FROM t, pg_try_advisory_lock(1) ok",
		"SELECT * FROM t, (SELECT pg_try_advisory_lock(1)) ok",
		"SELECT * FROM t WHERE (SELECT pg_try_advisory_lock(1))",
		"WITH got AS (SELECT pg_try_advisory_lock(1) AS ok) SELECT ok FROM got",
		"WITH got AS (SELECT pg_try_advisory_lock(1) AS ok) UPDATE t SET a = 1",
		"SELECT pg_try_advisory_lock((SELECT id FROM t LIMIT 1))",
		"SELECT pg_try_advisory_lock(extract(epoch FROM now())::int)",
		"SELECT pg_try_advisory_lock(1) IS DISTINCT FROM true",
		"SELECT pg_try_advisory_lock(1)::int UNION SELECT id FROM t",
		"SELECT id FROM t UNION SELECT pg_try_advisory_lock(1)::int",
		"SELECT id FROM t; SELECT pg_try_advisory_lock(1)",
		"INSERT INTO t (a) VALUES (pg_try_advisory_lock(1)) ON CONFLICT DO UPDATE SET a = true",
		"SELECT pg_try_advisory_lock(x) FROM (VALUES (1), (current_date)) v(x)",
		"SELECT pg_try_advisory_lock(1) FROM now() x GROUP BY a, b",
		"SELECT pg_try_advisory_lock(1) FROM now() x WINDOW a AS (), b AS ()",
		"SELECT pg_try_advisory_lock(1) FROM now() x ORDER BY a, b",
		"SELECT pg_try_advisory_lock(1) FROM now() x FOR UPDATE OF a, b",
		"INSERT INTO u SELECT pg_try_advisory_lock(1) FROM now() x RETURNING a, b",
		"SELECT pg_try_advisory_lock(1), now() ORDER BY a, b",
		"SELECT pg_try_advisory_lock(1) FROM LATERAL now() x",
		"SELECT pg_try_advisory_lock(1) FROM (WITH a AS (SELECT 1) SELECT 1 AS x) s",
		"SELECT pg_try_advisory_lock(1) FROM (SELECT(1)) s",
		"SELECT substring(pg_try_advisory_lock(1)::text FROM a)",
		"SELECT * FROM pg_try_advisory_lock(a)",
		"SELECT pg_try_advisory_lock(1), a.from b",
		"DO $$ BEGIN PERFORM 1 FROM t; x := pg_try_advisory_xact_lock(1); END $$",
		"SELECT trim(BOTH FROM 'x'), pg_try_advisory_lock(1)",
		"PREPARE p AS SELECT pg_try_advisory_lock(id) FROM t",
		"SELECT pg_advisory_lock(k) FROM unnest($1::bigint[]) AS k ORDER BY k",
		"SELECT pg_advisory_lock(k) FROM unnest($1::bigint[]) AS t(k)",
		"SELECT k, pg_try_advisory_lock(7, k::int) AS ok FROM unnest('{1,2}'::bigint[]) WITH ORDINALITY AS t (k, n) ORDER BY n, k;",
		"SELECT pg_advisory_lock(i) FROM pg_catalog.generate_series(1, 10) i",
		"SELECT pg_advisory_lock(42) FROM generate_series(1, 2)",
		"SELECT pg_advisory_xact_lock(hashtextextended(k, 0)) FROM regexp_split_to_table($1, ',') k ORDER BY 1",
		"SELECT pg_advisory_lock(k::text::int8) FROM jsonb_array_elements($1) WITH ORDINALITY t(k)",
		"SELECT pg_advisory_lock(a, b) FROM ROWS FROM (unnest($1::int[]), generate_series(1, 3)) AS t(a, b)",
		"SELECT pg_advisory_lock(a, b) FROM unnest($1::int[], $2::int[]) AS t(a, b)",
		"SELECT pg_advisory_lock(a, b) FROM unnest($1::int[]) a, LATERAL generate_series(1, a) b",
		"SELECT pg_advisory_lock(a, b) FROM unnest($1::int[]) a CROSS JOIN generate_series(1, 3) b",
		"SELECT * FROM unnest($1::bigint[]) k, pg_try_advisory_lock(k) ok",
		"SELECT pg_advisory_lock(k) FROM (VALUES (1), (2)) v(k) ORDER BY k",
		"SELECT pg_advisory_lock(k) FROM (VALUES (1, 2)) v(k) WHERE true", // one row
		"SELECT pg_advisory_lock(k) FROM (SELECT DISTINCT k FROM unnest($1::bigint[]) k WHERE k > 0 ORDER BY k LIMIT 3) s",
		"SELECT pg_advisory_lock(k) FROM unnest(ARRAY(SELECT id FROM t WHERE a LIMIT 2)) k",
		"SELECT pg_advisory_lock(k) FROM pg_temp.anything($1) k WHERE true", // of which it is not known that it makes rows
		"SELECT pg_advisory_lock(k) FROM unnest($1::bigint[]) k FOR UPDATE",
		"SELECT pg_try_advisory_lock(1), 1 IN (SELECT i FROM unnest($1::int[]) i) LIMIT 1", // once
		"SELECT pg_try_advisory_lock(a) FROM (SELECT 1 AS a, 2 AS b) s LIMIT 1",
		"WITH x AS (SELECT 1 LIMIT 1) SELECT pg_advisory_lock(k) FROM unnest($1::bigint[]) k",
		"EXPLAIN ANALYZE SELECT pg_advisory_lock(k) FROM unnest($1::bigint[]) k",
		"PREPARE p AS SELECT pg_advisory_lock(k) FROM unnest($1::bigint[]) k",
		"CREATE TABLE u AS SELECT pg_try_advisory_lock(k) FROM unnest('{1}'::bigint[]) k",
		"SELECT 1 FROM t LIMIT 1; SELECT pg_advisory_lock(k) FROM unnest('{1}'::bigint[]) k",
		"DO $$ BEGIN DELETE FROM t WHERE a; PERFORM pg_advisory_lock(k) FROM unnest(a) k ORDER BY k; END $$",
		"DO $$ BEGIN SELECT 1 INTO x; PERFORM pg_advisory_lock(k) FROM unnest(a) k ORDER BY k; END $$",
		"DO $$ BEGIN FOR i IN 1..2 LOOP PERFORM pg_advisory_lock(k) FROM unnest(a) k; END LOOP; END $$",
		"SELECT take_lock(k) FROM unnest($1::bigint[]) k",
	} {
		if st := r.Parse(text, true); st.PerRow {
			t.Errorf("per row: %s: %s", text, describe(st))
		}
	}
}

func TestSteps(t *testing.T) {
	r := New(nil)
	for _, tt := range []struct{ text, want string }{
		{"", ""},
		{"SELECT 1", ""},
		{"BEGIN", "BEGIN"},
		{" /* a */ begin work;", "BEGIN"},
		{"BEGIN TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY", "BEGIN repeatable read"},
		{"BEGIN READ WRITE ISOLATION LEVEL Serializable DEFERRABLE", "BEGIN serializable"},
		{"START TRANSACTION ISOLATION LEVEL READ UNCOMMITTED", "BEGIN read uncommitted"},
		{"COMMIT", "COMMIT"},
		{"END", "COMMIT"},
		{"COMMIT WORK AND CHAIN", "COMMIT chain"},
		{"END TRANSACTION AND NO CHAIN", "COMMIT"},
		{"ROLLBACK", "ROLLBACK"},
		{"ABORT WORK AND CHAIN;", "ROLLBACK chain"},
		{"COMMIT PREPARED 'x'", ""},
		{"ROLLBACK PREPARED 'x'", ""},
		{"SAVEPOINT", "SAVEPOINT"}, {"EXECUTE", "EXECUTE"}, {"SET", ""}, {"RESET", ""}, {"SET LOCAL", ""}, {"RELEASE", "RELEASE"}, {"DEALLOCATE", "DEALLOCATE"}, {"PREPARE", "PREPARE"}, // syntax errors
		{"SAVEPOINT A", "SAVEPOINT a"},
		{`SAVEPOINT "A""b"`, `SAVEPOINT A"b`},
		{`SAVEPOINT U&"\0041"`, "SAVEPOINT A"},
		{"SAVEPOINT " + strings.Repeat("x", 62) + "äz", "SAVEPOINT " + strings.Repeat("x", 62)},
		{"RELEASE a", "RELEASE a"},
		{"RELEASE SAVEPOINT a", "RELEASE a"},
		{"RELEASE savepoint", "RELEASE savepoint"},
		{"ROLLBACK TO a", "ROLLBACK TO a"},
		{"ROLLBACK WORK TO SAVEPOINT a", "ROLLBACK TO a"},
		{"ROLLBACK TRANSACTION TO a", "ROLLBACK TO a"},
		{"ABORT TO a", "ROLLBACK"}, // a syntax error
		{"PREPARE TRANSACTION 'x'", "PREPARE TRANSACTION"},
		{"PREPARE transaction AS SELECT 1", "PREPARE transaction"},
		{"PREPARE p AS SELECT 1", "PREPARE p"},
		{"EXECUTE p", "EXECUTE p"},
		{"EXECUTE p(1, 2)", "EXECUTE p"},
		{"EXPLAIN ANALYZE EXECUTE p", "EXECUTE p"},
		{"EXPLAIN ANALYZE VERBOSE EXECUTE p", "EXECUTE p"},
		{"EXPLAIN (ANALYZE, VERBOSE) EXECUTE p", "EXECUTE p"},
		{"EXPLAIN EXECUTE p", ""},
		{"EXPLAIN ANALYZE SELECT 1", ""},
		{"CREATE TABLE t AS EXECUTE p(1)", "EXECUTE p"},
		{"CREATE TABLE t (id int)", ""},
		{"CREATE TABLE t AS SELECT 1 AS execute", ""},
		{"CREATE TABLE t AS EXECUTE", "EXECUTE"}, // a syntax error
		{"CREATE TABLE t (a int DEFAULT cast(1 AS execute))", ""},
		{"DEALLOCATE p", "DEALLOCATE p"},
		{"DEALLOCATE PREPARE p", "DEALLOCATE p"},
		{"DEALLOCATE prepare", "DEALLOCATE prepare"},
		{"DEALLOCATE ALL", "DEALLOCATE"},
		{"DEALLOCATE PREPARE ALL", "DEALLOCATE"},
		{`DEALLOCATE "all"`, "DEALLOCATE all"},
		{"DISCARD ALL", "DISCARD ALL"},
		{"DISCARD PLANS", ""},
		{"SET TRANSACTION ISOLATION LEVEL READ COMMITTED", "SET TRANSACTION read committed"},
		{"SET LOCAL TRANSACTION READ ONLY, ISOLATION LEVEL SERIALIZABLE", "SET TRANSACTION serializable"},
		{"SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE", "SET TRANSACTION serializable"},
		{"SET TRANSACTION READ ONLY", ""},
		{"SET TRANSACTION SNAPSHOT 'x'", ""},
		{"SET transaction_isolation = 'repeatable READ'", "SET TRANSACTION repeatable read"},
		{"SET LOCAL Transaction_Isolation TO serializable", "SET TRANSACTION serializable"},
		{"SET SESSION transaction_isolation TO 'x'", "SET TRANSACTION"},
		{"SET transaction_isolatiox TO serializable", ""},
		{"SET transaction_isolation TO serialisable", "SET TRANSACTION"},
		{"SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE", "SET SESSION CHARACTERISTICS serializable"},
		{"SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY", ""},
		{"SET default_transaction_isolation TO 'serializable'", "SET SESSION CHARACTERISTICS serializable"},
		{`SET SESSION "default_TRANSACTION_isolation" = "serializable"`, "SET SESSION CHARACTERISTICS serializable"},
		{"SET LOCAL default_transaction_isolation TO 'serializable'", ""},
		{"SET default_transaction_isolation TO DEFAULT", "SET SESSION CHARACTERISTICS"},
		{"RESET default_transaction_isolation", "SET SESSION CHARACTERISTICS"},
		{"RESET ALL", "SET SESSION CHARACTERISTICS"},
		{"RESET search_path", ""},
		{"SET search_path TO x", ""},
		{"SET SESSION AUTHORIZATION x", ""},

		// Several statements.
		{"COMMIT; BEGIN", "COMMIT; BEGIN"},
		{"begin; select ';', $$;commit;$$, \"a;b\" /* ; */; savepoint a -- ;\n; rollback to a", "BEGIN; SAVEPOINT a; ROLLBACK TO a"},
		{";;BEGIN;;", "BEGIN"},
		{"SELECT 1; DISCARD ALL;", "DISCARD ALL"},
		{"SELECT 1; CALL p()", ""},
		{"SELECT 1; DO $$ BEGIN CALL p(); END $$", ""},
		{"SELECT begin atomic; COMMIT", "COMMIT"},
		{"CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT 1; END; COMMIT", "COMMIT"},
		{"CREATE RULE r AS ON INSERT TO t DO (SELECT 1; COMMIT); BEGIN", "BEGIN"},
		{"DO 'a;COMMIT'; COMMIT", "COMMIT"},
		{"SELECT 1; SELECT 'COMMIT", ""},
		{"PREPARE p AS SELECT 1; DEALLOCATE p", "PREPARE p; DEALLOCATE p"},

		// With calls.
		{"BEGIN; SELECT pg_advisory_xact_lock(1); COMMIT AND CHAIN", "opaque; pg_advisory_xact_lock bigint 1; BEGIN; COMMIT chain"},
		{"BEGIN /* advisory */", "BEGIN"},
		{"DISCARD ALL -- advisory", "DISCARD ALL"},
	} {
		want := tt.want
		if !strings.HasPrefix(want, "opaque") {
			want = strings.TrimSuffix("no call; "+want, "; ")
		}
		if got := describe(r.Parse(tt.text, true)); got != want {
			t.Errorf("%s\n got %s\nwant %s", tt.text, got, want)
		}
	}
}

func TestStandardConformingStringsOff(t *testing.T) {
	r := New(nil)
	for _, tt := range []struct{ text, on, off string }{
		{`SELECT '\', pg_advisory_lock(1), '`, "opaque, session; pg_advisory_lock bigint 1", "no call"},
		{`SELECT '\'', pg_advisory_lock(1) --'`, "no call", opaque1},
		{`SELECT '\\', pg_advisory_lock(1)`, opaque1, opaque1},
		{`SELECT pg_advisory_lock('\061')`, "plain, session; pg_advisory_lock bigint '…'", lock1},
		{`SELECT pg_advisory_lock(hashtext('\061'))`, "plain, session; pg_advisory_lock bigint hashtext('…') weak", "plain, session; pg_advisory_lock bigint hashtext('…') weak"},
		{`DO 'BEGIN PERFORM ''\\'', pg_advisory_lock(1); END'`, opaque1, "opaque, session"}, // off: the string inside does not end
		{`COMMIT; SELECT '\'; BEGIN; --'`, "no call; COMMIT; BEGIN", "no call; COMMIT"},
	} {
		if got := describe(r.Parse(tt.text, true)); got != tt.on {
			t.Errorf("on: %s\n got %s\nwant %s", tt.text, got, tt.on)
		}
		if got := describe(r.Parse(tt.text, false)); got != tt.off {
			t.Errorf("off: %s\n got %s\nwant %s", tt.text, got, tt.off)
		}
	}
}

func TestConfiguredFunctions(t *testing.T) {
	r := New([]string{"take_lock", "App.Take_App", `"TakeExact"`, ` app . "Odd Name" `, "", "1x", "reset"})
	for _, tt := range []struct{ text, want string }{
		{"SELECT take_lock(1)", "opaque, session"},
		{"SELECT TAKE_LOCK (1)", "opaque, session"},
		{"SELECT any_schema.take_lock(1) FROM t", "opaque, session, per row"},
		{"SELECT take_lock", "no call"},
		{"SELECT 'take_lock(1)'", "no call"},
		{"CALL take_lock(1)", "opaque, session"},
		{"SELECT app.take_app(1)", "opaque, session"},
		{"SELECT take_app(1)", "opaque, session"},
		{"SELECT other.take_app(1)", "no call"},
		{"SELECT takeexact(1)", "no call"},
		{`SELECT "TakeExact"(1)`, "opaque, session"},
		{`SELECT "Odd Name"(1)`, "opaque, session"},
		{"SELECT reset(1)", "opaque, session"},
		{"RESET ALL", "no call; SET SESSION CHARACTERISTICS"},
		{"SELECT pg_advisory_xact_lock(1), take_lock(1)", "opaque, session; pg_advisory_xact_lock bigint 1"},
		{"DO $$ BEGIN EXECUTE 'SELECT \"Odd Name\"' || '(1)'; END $$", "opaque, session"},
		{"DO LANGUAGE x $$ take_lock $$", "opaque, session"},
		{"DO LANGUAGE x $$ pg_advisory_xact_lock $$", "opaque"},
		{"PREPARE p AS SELECT take_lock(1)", "no call; PREPARE p locks session"},
		{"SELECT unknown(1)", "no call"},
	} {
		if got := describe(r.Parse(tt.text, true)); got != tt.want {
			t.Errorf("%s\n got %s\nwant %s", tt.text, got, tt.want)
		}
	}
	if long := strings.Repeat("f", 100); New([]string{long}).Parse("SELECT "+long+"(1)", true).Form != Opaque {
		t.Error("a name longer than the server keeps")
	}
}

func TestFunctionsOfManyRows(t *testing.T) {
	for _, f := range []string{"unnest", "generate_series", "generate_subscripts", "string_to_table", "regexp_split_to_table", "regexp_matches",
		"json_array_elements", "json_array_elements_text", "jsonb_array_elements", "jsonb_array_elements_text",
		"json_each", "json_each_text", "jsonb_each", "jsonb_each_text", "json_to_recordset", "jsonb_to_recordset"} {
		if text := "SELECT pg_try_advisory_lock(x) FROM " + f + "($1) x LIMIT 1"; !New(nil).Parse(text, true).PerRow {
			t.Error(text)
		}
	}
}

func TestOpaqueArguments(t *testing.T) {
	for args, want := range map[string]int{"": 0, "id": 1, "id, 2": 2, "1, 2, 3": 0, "f(1, 2)": 1} {
		if got := New(nil).Parse("SELECT pg_advisory_lock("+args+")", true).Calls[0].Args; len(got) != want {
			t.Errorf("%s: %d", args, len(got))
		}
	}
}

// Every call of a text is where it says.
func TestSpans(t *testing.T) {
	r := New(nil)
	for _, tt := range []struct {
		text string
		want []string
	}{
		{"SELECT  pg_catalog . pg_advisory_lock ( 1 ) AS x", []string{"pg_catalog . pg_advisory_lock ( 1 )"}},
		{"SELECT pg_advisory_lock(1), pg_advisory_unlock_all ( ) ;", []string{"pg_advisory_lock(1)", "pg_advisory_unlock_all ( )"}},
		{"SELECT 1, pg_advisory_lock(id) FROM t", []string{"pg_advisory_lock(id)"}},
		{"SELECT pg_advisory_lock(pg_try_advisory_lock(2)::int) FROM t", []string{"pg_advisory_lock(pg_try_advisory_lock(2)::int)", "pg_try_advisory_lock(2)"}},
		{"DO $x$ BEGIN PERFORM pg_advisory_lock(1); END $x$", []string{"pg_advisory_lock(1)"}},
		{"DO 'BEGIN PERFORM pg_advisory_lock(1); END'", []string{"pg_advisory_lock(1)"}},
		{"DO $x$ BEGIN EXECUTE 'SELECT pg_advisory_lock(1)'; END $x$", []string{"pg_advisory_lock(1)"}},
		{"DO 'BEGIN PERFORM ''a'', pg_advisory_lock(1); END'", []string{"'BEGIN PERFORM ''a'', pg_advisory_lock(1); END'"}},
		{"DO $x$ EXECUTE 'SELECT ''a'', pg_advisory_lock(1)' $x$", []string{"'SELECT ''a'', pg_advisory_lock(1)'"}},
		{"DO 'EXECUTE ''SELECT ''''a'''', pg_advisory_lock(1)'''", []string{"'EXECUTE ''SELECT ''''a'''', pg_advisory_lock(1)'''"}},
		{"SELECT 1, pg_advisory_lock(1", []string{"pg_advisory_lock(1"}},
		{"SELECT 1, (x).pg_advisory_lock(1)", []string{"pg_advisory_lock(1)"}},
	} {
		st := r.Parse(tt.text, true)
		var got []string
		for _, c := range st.Calls {
			got = append(got, tt.text[c.Start:c.End])
		}
		if strings.Join(got, "|") != strings.Join(tt.want, "|") {
			t.Errorf("%s\n got %q\nwant %q", tt.text, got, tt.want)
		}
	}
}

func TestOpaqueCallsAreBounded(t *testing.T) {
	text := "SELECT 1, " + strings.Repeat("pg_advisory_xact_lock(1), ", 300) + "pg_advisory_lock(1)"
	if st := New(nil).Parse(text, true); len(st.Calls) != maxCalls || !st.Session {
		t.Error(len(st.Calls), st.Session)
	}
}

func TestPlainColumnsAreBounded(t *testing.T) {
	text := "SELECT pg_advisory_lock(1)" + strings.Repeat(", pg_advisory_lock(1)", maxColumns-1)
	if st := New(nil).Parse(text, true); st.Form != Plain || len(st.Calls) != maxColumns {
		t.Error(st.Form, len(st.Calls))
	}
	if st := New(nil).Parse(text+", pg_advisory_lock(1)", true); st.Form != Opaque || !st.Session {
		t.Error(st.Form, st.Session)
	}
}

func TestPlainDepthIsBounded(t *testing.T) {
	for _, nest := range [][2]string{{"(", ")"}, {"CAST(", " AS int)"}, {"hashtext(", ")"}} {
		text := func(n int) string {
			return "SELECT pg_advisory_lock(" + strings.Repeat(nest[0], n) + "1" + strings.Repeat(nest[1], n) + ")"
		}
		if st := New(nil).Parse(text(maxDepth), true); st.Form != Plain {
			t.Errorf("%s × %d: %s", nest[0], maxDepth, st.Form)
		}
		if st := New(nil).Parse(text(maxDepth+1), true); st.Form != Opaque || !st.Session {
			t.Errorf("%s × %d: %s", nest[0], maxDepth+1, st.Form)
		}
	}
}
