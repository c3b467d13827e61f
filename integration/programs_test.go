package integration

// The programs of the conformance suite: values, errors, contexts, transactions,
// statements. Those about faults are in faults_test.go.

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/lib/pq"

	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

func programs() []program {
	return []program{
		{name: "values", run: values},
		{name: "arguments", run: arguments},
		{name: "lock statements", run: lockStatements},
		{name: "locks of a pool", run: pooledLocks, when: func(r road) bool { return r.observing }},
		{name: "errors", run: failures},
		{name: "contexts", run: contexts},
		{name: "locks on an ended context", run: endedLocks, only: overPgx, when: func(r road) bool { return r.title != "pgxpool" }}, // which of its connections has a statement cached is a race
		{name: "transactions", run: transactions},
		{name: "statements", run: statements},
		{name: "large", run: large},
		{name: "pgx through Raw", run: throughRaw, only: overPgx},
		{name: "COPY of lib/pq", run: copyIn, only: overPQ},
		{name: "faults", run: faults},
		{name: "waiting for a connection", run: limits},
	}
}

// kinds are expressions of every kind of column.
var kinds = []string{
	"true", "'x'::\"char\"", "1::int2", "-2::int4", "9223372036854775807::int8", "1.5::float4", "'NaN'::float8", "1e300::float8",
	"123456789012345678901234567890.123::numeric", "'NaN'::numeric", "0.10::numeric(5,2)", "12.34::money", "42::oid",
	"'text'::text", "'häß\u20ac'::text", "''::text", "'ab'::varchar(10)", "'ab'::char(5)", "'pg_class'::name", "'pg_class'::regclass",
	`'\x00ff10'::bytea`, `''::bytea`,
	"'2024-02-29'::date", "'infinity'::date", "'0044-03-15 BC'::date", "'13:14:15.678'::time", "'13:14:15+02'::timetz",
	"'2024-02-29 13:14:15.678901'::timestamp", "'infinity'::timestamp", "'2024-02-29 13:14:15.678901+00'::timestamptz", "'-infinity'::timestamptz",
	"'1 year 2 mons 3 days 04:05:06'::interval",
	"'11111111-2222-3333-4444-555555555555'::uuid", `'{"a": [1, null]}'::json`, `'{"a": [1, null]}'::jsonb`, "'null'::jsonb", "'$.a'::jsonpath",
	"'10.1.2.3/8'::inet", "'::1'::inet", "'10.0.0.0/8'::cidr", "'08:00:2b:01:02:03'::macaddr", "B'101'::bit(3)", "B'10111'::varbit",
	"'<a>1</a>'::xml", "'a b'::tsvector", "'a & b'::tsquery",
	"ARRAY[1,2,NULL]::int4[]", "ARRAY[1,2]::int8[]", "ARRAY[[1,2],[3,4]]::int4[]", "ARRAY['a','b c','\"']::text[]", "'{}'::text[]",
	"ARRAY['2024-02-29'::date]", "ARRAY[true,false]", `ARRAY['\x01'::bytea]`, "ARRAY[1.5::numeric]",
	"'[1,5)'::int4range", "'empty'::int4range", "'[2024-01-01,2024-02-01)'::daterange", "'[1,2]'::numrange", "'{[1,2],[4,5]}'::int4multirange",
	"'(1,2)'::point", "'((0,0),(1,1))'::box", "'<(0,0),1>'::circle", "'((0,0),(1,1),(2,0))'::polygon", "'[(0,0),(1,1)]'::lseg",
	"'16/B374D848'::pg_lsn", "'10:20:10,14'::txid_snapshot", "pg_catalog.void_in('')",
	"'green'::conformance.colour", "'(1,a b)'::conformance.pair", "5::conformance.positive", "ARRAY['red','green']::conformance.colour[]", "ROW(1,'x')",
}

// objects are the types that kinds needs.
func (w *witness) objects() {
	w.see.Exec(`DROP SCHEMA IF EXISTS conformance CASCADE`)
	w.see.Exec(`CREATE SCHEMA conformance`)
	w.see.Exec(`CREATE TYPE conformance.colour AS ENUM ('red', 'green')`)
	w.see.Exec(`CREATE TYPE conformance.pair AS (a int4, b text)`)
	w.see.Exec(`CREATE DOMAIN conformance.positive AS int4 CHECK (VALUE > 0)`)
}

func values(w *witness) {
	w.objects()
	for _, kind := range kinds {
		for _, expr := range []string{kind, "CASE WHEN now() IS NULL THEN " + kind + " END"} {
			rows, err := w.db.QueryContext(w.Context(), "SELECT "+expr+" AS v")
			if err != nil {
				w.say(expr, err)
				continue
			}
			w.scans(expr, rows)
		}
	}
	// Types of columns that exist, as tools that generate code ask for them.
	w.see.Exec(`CREATE TABLE conformance.columns (a int NOT NULL, b varchar(7), c numeric(9,2), d timestamptz(3), e text[], f bytea, g char(3)[], h interval(2))`)
	rows, err := w.db.QueryContext(w.Context(), "SELECT *, a AS a, 1 FROM conformance.columns")
	must(w, err)
	w.columns("table", rows)
	w.say("table has rows", rows.Next(), rows.Err(), rows.Close())
	_, err = rows.ColumnTypes()
	w.say("types after close", err)
	// Nothing at all comes back, and a column without a name.
	for _, query := range []string{"SELECT", "SELECT WHERE false", `SELECT 1 AS ""`, "", ";", "-- nothing", "CREATE TEMP TABLE nothing ()", "SELECT 1 AS a, 2 AS a"} {
		rows, err := w.db.QueryContext(w.Context(), query)
		w.say("query "+query, err)
		if err == nil {
			w.scans("query "+query, rows)
		}
		result, err := w.db.ExecContext(w.Context(), query)
		w.result("exec "+query, result, err)
	}
}

// scans says all there is to say about rows: types, and every way to scan.
func (w *witness) scans(label string, rows *sql.Rows) {
	defer rows.Close()
	w.columns(label, rows)
	names, err := rows.Columns()
	w.say(label+", columns", names, err)
	for n := 0; rows.Next(); n++ {
		row := fmt.Sprintf("%s, row %d", label, n)
		for _, dest := range []any{
			new(any), new(string), new([]byte), new(sql.RawBytes), new(int64), new(int16), new(float64), new(bool), new(time.Time), new(*string),
			new(sql.NullString), new(sql.NullInt64), new(sql.NullTime), new(sql.Null[float64]), new([]string), new(net.IP), new(json.RawMessage),
			new(pgtype.Text), new(pq.StringArray), new(pq.Int64Array), new(chan int),
			new(ownBool), new(*bool), new(sql.Null[bool]), new(pgtype.Bool), new([]int64), new([]time.Time), new(netip.Addr), new(map[string]any), new(pgtype.Range[pgtype.Int4]),
		} {
			dests := make([]any, len(names))
			for i := range dests {
				dests[i] = dest
			}
			if err := rows.Scan(dests...); err != nil {
				w.say(fmt.Sprintf("%s, scan %T", row, dest), err)
				continue
			}
			w.say(fmt.Sprintf("%s, scan %T", row, dest), pointed(dest))
		}
	}
	w.say(label+", another result set", rows.NextResultSet())
	w.say(label+", end", rows.Err(), rows.Close(), rows.Err())
}

// pointed is what a scan destination points to; through a second pointer too.
func pointed(dest any) any {
	switch d := dest.(type) {
	case **string:
		if *d == nil {
			return nil
		}
		return **d
	case **bool:
		if *d == nil {
			return nil
		}
		return **d
	case *any:
		return *d
	}
	return reflect.ValueOf(dest).Elem().Interface()
}

func (w *witness) columns(label string, rows *sql.Rows) {
	types, err := rows.ColumnTypes()
	if err != nil {
		w.say(label+", types", err)
	}
	for _, c := range types {
		length, hasLength := c.Length()
		precision, scale, decimal := c.DecimalSize()
		nullable, known := c.Nullable()
		typeName := c.DatabaseTypeName()
		if len(typeName) >= 5 && strings.Trim(typeName, "0123456789") == "" {
			typeName = "oid" // pgx's name for a type that it does not know
		}
		w.say(label+", type", c.Name(), typeName, c.ScanType(), length, hasLength, precision, scale, decimal, nullable, known)
	}
}

func (w *witness) result(label string, r sql.Result, err error) {
	if err != nil {
		w.say(label, r == nil, err)
		return
	}
	n, err := r.RowsAffected()
	id, iderr := r.LastInsertId()
	w.say(label, n, err, id, iderr)
}

// valuer is a driver.Valuer of a program's own.
type valuer struct {
	v   any
	err error
}

func (v valuer) Value() (driver.Value, error) { return v.v, v.err }

type (
	ownBool   bool
	ownString string
	ownInt    int16
)

func arguments(w *witness) {
	seven, noTime := 7, (*time.Time)(nil)
	args := []struct {
		cast string
		v    any
	}{
		{"int4", 5}, {"int8", int64(-5)}, {"int8", uint32(5)}, {"int8", uint64(1 << 63)}, {"int2", int8(5)}, {"int4", &seven}, {"int4", "5"}, {"int4", []byte("5")},
		{"int4", 5.0}, {"int4", 1.5}, {"int4", "five"}, {"int4", 1 << 40}, {"int4", nil}, {"int4", true}, {"int8", ownInt(5)},
		{"text", "x"}, {"text", ownString("x")}, {"text", []byte("x")}, {"text", 5}, {"text", nil}, {"text", time.Unix(0, 0).UTC()}, {"text", "a\x00b"}, {"text", "a\xffb"},
		{"text", noTime}, {"text", sql.NullString{}}, {"text", sql.NullString{String: "s", Valid: true}}, {"int8", sql.NullInt64{Int64: 3, Valid: true}},
		{"text", valuer{v: "own"}}, {"text", valuer{err: errors.New("refuses")}}, {"text", valuer{v: struct{}{}}}, {"int8", valuer{v: int64(6)}}, {"text", (*valuer)(nil)},
		{"bool", true}, {"bool", "t"}, {"bool", 1}, {"float8", 1.5}, {"float4", float32(1.5)}, {"numeric", "1.50"}, {"numeric", 1.5}, {"numeric", big.NewInt(5)},
		{"bytea", []byte{0, 255}}, {"bytea", "text"}, {"bytea", []byte(nil)}, {"bytea", json.RawMessage(`{}`)},
		{"timestamptz", time.Date(2024, 2, 29, 1, 2, 3, 4000, time.UTC)}, {"timestamp", time.Date(2024, 2, 29, 1, 2, 3, 4000, time.FixedZone("x", 3600))}, {"date", "2024-02-29"},
		{"interval", time.Second}, {"jsonb", `{"a":1}`}, {"jsonb", map[string]any{"a": 1}}, {"json", json.RawMessage(`{"a":1}`)}, {"jsonb", struct{ A int }{1}}, {"jsonb", []byte(`[1]`)},
		{"text[]", []string{"a", "b"}}, {"int4[]", []int{1, 2}}, {"int8[]", []int64{}}, {"text[]", pq.Array([]string{"a"})}, {"text[]", "{a}"}, {"uuid", "11111111-2222-3333-4444-555555555555"}, {"uuid", [16]byte{1}},
		{"inet", net.ParseIP("10.0.0.1")}, {"inet", netip.MustParseAddr("10.0.0.1")}, {"inet", "10.0.0.1"}, {"int4range", "[1,2)"},
		{"text", make(chan int)}, {"text", struct{}{}}, {"text", func() {}}, {"text", pgtype.Text{String: "p", Valid: true}}, {"text", sql.Named("name", "x")}, {"text", sql.Out{}},
	}
	for i, a := range args {
		label := fmt.Sprintf("%d: %T as %s", i, a.v, a.cast)
		query := "SELECT ($1::" + a.cast + ")::text, $1::" + a.cast + " IS NULL"
		var got sql.NullString
		var null bool
		err := w.db.QueryRowContext(w.Context(), query, a.v).Scan(&got, &null)
		w.say(label, got, null, err)
		result, err := w.db.ExecContext(w.Context(), query, a.v)
		w.result(label+", exec", result, err)
		stmt, err := w.db.PrepareContext(w.Context(), query)
		must(w, err)
		got, null = sql.NullString{}, false
		err = stmt.QueryRowContext(w.Context(), a.v).Scan(&got, &null)
		w.say(label+", prepared", got, null, err)
		result, err = stmt.ExecContext(w.Context(), a.v)
		w.result(label+", prepared exec", result, err)
		must(w, stmt.Close())
	}
	if w.driver == overPgx {
		var got string
		for _, options := range [][]any{
			{pgx.NamedArgs{"who": "x"}}, {pgx.QueryExecModeExec, pgx.NamedArgs{"who": "x"}}, {pgx.StrictNamedArgs{"who": "x"}}, {pgx.StrictNamedArgs{"whom": "x"}},
		} {
			err := w.db.QueryRowContext(w.Context(), "SELECT @who::text", options...).Scan(&got)
			w.say(fmt.Sprintf("named %T", options[0]), got, err)
		}
		for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
			var n int
			err := w.db.QueryRowContext(w.Context(), "SELECT $1::int4", mode, 7).Scan(&n)
			w.say("mode "+mode.String(), n, err)
			result, err := w.db.ExecContext(w.Context(), "SELECT $1::int4", mode, 7)
			w.result("mode "+mode.String()+", exec", result, err)
		}
		var s string
		err := w.db.QueryRowContext(w.Context(), "SELECT $1::int4", pgx.QueryResultFormats{pgx.TextFormatCode}, 7).Scan(&s)
		w.say("result formats", s, err)
	}
}

// lockStatements are texts with lock calls, those that go wrong too. Each
// leaves nothing behind, or what it leaves is given back by the next round.
var lockTexts = []struct {
	query string
	args  []any
}{
	{"SELECT pg_advisory_lock(1)", nil},
	{"SELECT pg_advisory_lock($1)", []any{1}},
	{"SELECT pg_advisory_lock($1)", []any{int64(1)}},
	{"SELECT pg_advisory_lock($1)", []any{"1"}},
	{"SELECT pg_advisory_lock($1)", []any{"one"}},
	{"SELECT pg_advisory_lock($1)", []any{nil}},
	{"SELECT pg_advisory_lock($1)", []any{1.5}},
	{"SELECT pg_advisory_lock($1)", []any{uint64(1 << 63)}},
	{"SELECT pg_advisory_lock($1)", []any{valuer{v: int64(1)}}},
	{"SELECT pg_advisory_lock($1)", []any{valuer{err: errors.New("refuses")}}},
	{"SELECT pg_advisory_lock($1)", []any{struct{}{}}},
	{"SELECT pg_advisory_lock($1)", []any{sql.Named("key", 1)}},
	{"SELECT pg_advisory_lock(@key)", []any{pgx.NamedArgs{"key": 1}}},
	{"SELECT pg_try_advisory_lock(@key)", []any{pgx.NamedArgs{"key": int64(99)}}},
	{"SELECT pg_advisory_lock($1)", nil},
	{"SELECT pg_advisory_lock($1)", []any{1, 2}},
	{"SELECT pg_advisory_lock(1)", []any{1}},
	{"SELECT pg_advisory_lock($1, $2)", []any{1, 2}},
	{"SELECT pg_advisory_lock($1, $2)", []any{1, int64(1) << 40}},
	{"SELECT pg_advisory_lock(NULL)", nil},
	{"SELECT pg_advisory_lock('x')", nil},
	{"SELECT pg_advisory_lock()", nil},
	{"SELECT pg_advisory_lock(1, 2, 3)", nil},
	{"SELECT pg_advisory_lock_shared(1), pg_advisory_lock(2, 3) AS second", nil},
	{"SELECT pg_catalog.pg_advisory_lock ( 1 ) ;", nil},
	{"/* why */ select PG_Advisory_Lock(1) -- so", nil},
	{"SELECT pg_try_advisory_lock(1)", nil},
	{"SELECT pg_try_advisory_lock($1) AS got", []any{1}},
	{"SELECT pg_try_advisory_lock($1), pg_try_advisory_lock_shared($2, $3)", []any{1, 2, 3}},
	{"SELECT pg_try_advisory_lock(99)", nil}, // somebody else has it
	{"SELECT pg_try_advisory_xact_lock(1)", nil},
	{"SELECT pg_try_advisory_xact_lock(99)", nil},
	{"SELECT pg_advisory_xact_lock(1)", nil},
	{"SELECT pg_advisory_xact_lock_shared($1)", []any{1}},
	{"SELECT pg_advisory_unlock(1)", nil},
	{"SELECT pg_advisory_unlock($1)", []any{1}},
	{"SELECT pg_advisory_unlock($1)", []any{nil}},
	{"SELECT pg_advisory_unlock_shared($1)", []any{1}},
	{"SELECT pg_advisory_lock(1), pg_advisory_unlock(1)", nil},
	{"SELECT pg_advisory_lock(1), pg_advisory_unlock(1), pg_advisory_unlock(1)", nil},
	{"SELECT pg_advisory_unlock_all()", nil},
	{"SELECT pg_advisory_lock(hashtext($1))", []any{"name"}},
	{"SELECT pg_advisory_lock(hashtextextended('name', 0))", nil},
	{"SELECT pg_try_advisory_lock(id) FROM generate_series(1, 3) id", nil},
	{"SELECT id FROM generate_series(1, 3) id WHERE pg_try_advisory_lock($1, id)", []any{1}},
	{"WITH t AS (SELECT pg_try_advisory_lock(1) AS got) SELECT got FROM t", nil},
	{"SELECT got FROM pg_try_advisory_lock($1) got", []any{1}},
	{"SELECT pg_advisory_lock(1) LIMIT 0", nil},
	{"SELECT pg_advisory_lock(1); SELECT pg_advisory_unlock(1)", nil},
	{"SELECT pg_advisory_lock(1); SELECT 1/0", nil},
	{"SELECT 1/0, pg_advisory_lock(1)", nil},
	{"DO $$ BEGIN PERFORM pg_advisory_lock(1); END $$", nil},
	{"DO $$ BEGIN PERFORM pg_advisory_lock(1); RAISE EXCEPTION 'no'; END $$", nil},
	{"SELECT 'pg_advisory_lock(1)'", nil},
	{"SELECT proname::text FROM pg_proc WHERE proname = 'pg_advisory_lock' LIMIT 1", nil},
	{"EXPLAIN (COSTS off) SELECT pg_advisory_lock(1)", nil},
	{"INSERT INTO held SELECT pg_try_advisory_lock(1) RETURNING got", nil},
	{"SELECT pg_advisory_lok(1)", nil},
	{"SELECT pg_advisory_lock(1", nil},
}

func lockStatements(w *witness) {
	w.see.Lock(99)
	defer w.see.Unlock(99)
	w.see.Exec("DROP TABLE IF EXISTS held")
	w.see.Exec("CREATE TABLE held (got bool)")
	for i, l := range lockTexts {
		for _, inTx := range []bool{false, true} {
			// A connection each, so that what one text leaves is not the next one's.
			conn := w.conn()
			label := fmt.Sprintf("%d %s %v, in a transaction %t", i, l.query, len(l.args), inTx)
			do := doer(conn)
			var tx *sql.Tx
			restart := func() {
				if !inTx {
					return
				}
				if tx != nil {
					w.say(label+", commit", tx.Commit())
				}
				var err error
				tx, err = conn.BeginTx(w.Context(), nil)
				must(w, err)
				do = tx
			}
			restart()
			rows, err := do.QueryContext(w.Context(), l.query, l.args...)
			w.say(label+", query", err)
			if err == nil {
				w.scans(label, rows)
			}
			w.held(label + ", after query")
			restart()
			result, err := do.ExecContext(w.Context(), l.query, l.args...)
			w.result(label+", exec", result, err)
			w.held(label + ", after exec")
			restart()
			var first any
			err = do.QueryRowContext(w.Context(), l.query, l.args...).Scan(&first)
			w.say(label+", row", first, err)
			restart()
			stmt, err := do.PrepareContext(w.Context(), l.query)
			w.say(label+", prepare", err)
			if err == nil {
				for range 2 {
					restart()
					use := stmt
					if inTx {
						use = tx.StmtContext(w.Context(), stmt)
					}
					rows, err := use.QueryContext(w.Context(), l.args...)
					w.say(label+", prepared query", err)
					if err == nil {
						w.scans(label+", prepared", rows)
					}
					restart()
					if inTx {
						use = tx.StmtContext(w.Context(), stmt)
					}
					result, err = use.ExecContext(w.Context(), l.args...)
					w.result(label+", prepared exec", result, err)
				}
				w.say(label+", prepared close", stmt.Close())
			}
			if tx != nil {
				w.say(label+", commit", tx.Commit())
			}
			w.held(label + ", at the end")
			_, err = conn.ExecContext(w.Context(), "SELECT pg_advisory_unlock_all()")
			must(w, err)
			w.held(label + ", given back")
			w.say(label+", close", conn.Close())
		}
	}
}

// doer is what *sql.DB, *sql.Conn and *sql.Tx have in common.
type doer interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
	QueryContext(context.Context, string, ...any) (*sql.Rows, error)
	QueryRowContext(context.Context, string, ...any) *sql.Row
	PrepareContext(context.Context, string) (*sql.Stmt, error)
}

// held says what another connection sees: how many hold or want what.
func (w *witness) held(label string) {
	w.Helper()
	var locks []string
	for _, l := range w.see.Locks() {
		pair := ""
		if a, b, ok := l.Pair(); ok {
			pair = fmt.Sprintf("(%d, %d)", a, b)
		}
		locks = append(locks, fmt.Sprint(l.Key, pair, " ", l.Mode, " ", l.Granted))
	}
	slices.Sort(locks)
	w.say(label+", held", text(strings.Join(locks, ", ")))
}

// pooledLocks does it all wrong, on *sql.DB itself.
func pooledLocks(w *witness) {
	w.db.SetMaxOpenConns(1) // so that it is one and the same connection
	for i, l := range lockTexts {
		if strings.Contains(l.query, "99") && !strings.Contains(l.query, "try") {
			continue
		}
		label := fmt.Sprint(i, " ", l.query)
		result, err := w.db.ExecContext(w.Context(), l.query, l.args...)
		w.result(label, result, err)
		w.held(label)
		var first any
		err = w.db.QueryRowContext(w.Context(), l.query, l.args...).Scan(&first)
		w.say(label+", row", first, err)
		w.stats(label)
	}
	result, err := w.db.ExecContext(w.Context(), "SELECT pg_advisory_unlock_all()")
	w.result("unlock all", result, err)
	w.held("unlock all")
}

func failures(w *witness) {
	w.see.Exec("DROP TABLE IF EXISTS refuses, parents CASCADE")
	w.see.Exec("CREATE TABLE parents (id int PRIMARY KEY)")
	w.see.Exec("CREATE TABLE refuses (id int PRIMARY KEY, n int NOT NULL CHECK (n > 0), p int REFERENCES parents)")
	for _, query := range []string{
		"SELEC 1", "SELECT * FROM nowhere", "SELECT nothing FROM refuses", "SELECT 1/0", "SELECT f()", "SELECT 'x'::int", "SELECT $1", "SELECT $2::int",
		"INSERT INTO refuses VALUES (1, 1), (1, 1)", "INSERT INTO refuses VALUES (1, 0)", "INSERT INTO refuses VALUES (1, NULL)", "INSERT INTO refuses VALUES (1, 1, 1)",
		"INSERT INTO refuses VALUES (7, 7)", "UPDATE refuses SET n = 8", "DELETE FROM refuses", "SELECT id FROM refuses", "TRUNCATE refuses",
		"SELECT 1; SELECT 2", "SELECT 1; SELECT 1/0", "SELECT 1/(n-2) FROM generate_series(1,3) n", "DO $$ BEGIN RAISE EXCEPTION 'own' USING ERRCODE='XX123', DETAIL='d', HINT='h'; END $$",
		"SELECT pg_cancel_backend(pg_backend_pid()), pg_sleep(1)", "COMMIT", "ROLLBACK", "SAVEPOINT a", "LISTEN a", "SHOW nothing", "SET nothing = 1",
		"EXECUTE nothing", "DEALLOCATE nothing", "FETCH ALL FROM nothing", "VACUUM nowhere", "CREATE INDEX CONCURRENTLY i ON nowhere (id)",
	} {
		result, err := w.db.ExecContext(w.Context(), query)
		w.result("exec "+query, result, err)
		rows, err := w.db.QueryContext(w.Context(), query)
		w.say("query "+query, err)
		if err == nil {
			n := 0
			for rows.Next() {
				n++
			}
			w.say("query "+query+", rows", n, rows.Err(), rows.Close())
		}
		stmt, err := w.db.PrepareContext(w.Context(), query)
		w.say("prepare "+query, err)
		if err == nil {
			result, err := stmt.ExecContext(w.Context())
			w.result("prepared exec "+query, result, err)
			w.say("prepared close "+query, stmt.Close())
		}
		var one int
		w.say("after "+query, w.db.QueryRowContext(w.Context(), "SELECT 1").Scan(&one), one)
	}
	var n int
	w.say("no rows", w.db.QueryRow("SELECT 1 WHERE false").Scan(&n))
	w.say("too many destinations", w.db.QueryRow("SELECT 1").Scan(&n, &n))
	w.say("not scannable", w.db.QueryRow("SELECT 'x'").Scan(&n))
	w.say("too few arguments", w.db.QueryRow("SELECT $1::int + $2::int", 1).Scan(&n))
	w.say("too many arguments", w.db.QueryRow("SELECT $1::int", 1, 2).Scan(&n))
	rows, err := w.db.Query("SELECT 1")
	must(w, err)
	w.say("scan before next", rows.Scan(&n))
	must(w, rows.Close())
	w.say("next after close", rows.Next(), rows.Err(), rows.Scan(&n))
	tx, err := w.db.Begin()
	must(w, err)
	w.say("commit", tx.Commit())
	w.say("commit again", tx.Commit())
	w.say("rollback after commit", tx.Rollback())
	_, err = tx.Exec("SELECT 1")
	w.say("exec after commit", err)
	conn := w.conn()
	w.say("close", conn.Close())
	w.say("close again", conn.Close())
	w.say("ping after close", conn.PingContext(w.Context()))
	stmt, err := w.db.Prepare("SELECT 1")
	must(w, err)
	must(w, stmt.Close())
	w.say("closed statement", stmt.QueryRow().Scan(&n))
	w.say("ping", w.db.Ping())
	w.stats("errors")
	w.say("close the pool", w.db.Close(), w.db.Close())
	w.say("ping after", w.db.Ping())
	w.say("query after", w.db.QueryRow("SELECT 1").Scan(&n))
}

func contexts(w *witness) {
	canceled, cancel := context.WithCancel(w.Context())
	cancel()
	var n int
	query := "SELECT 1 FROM pg_sleep(60)"
	conn := w.conn()
	if w.driver == overPgx { // lib/pq sends first, and the cancel races with the statement
		_, err := conn.ExecContext(canceled, "SELECT 1")
		w.say("exec on an ended context", err)
		w.say("query on an ended context", conn.QueryRowContext(canceled, "SELECT 1").Scan(&n))
		_, err = conn.BeginTx(canceled, nil)
		w.say("begin on an ended context", err)
		_, err = conn.PrepareContext(canceled, "SELECT 1")
		w.say("prepare on an ended context", err)
		w.say("ping on an ended context", conn.PingContext(canceled))
	}
	w.say("conn afterwards", conn.QueryRowContext(w.Context(), "SELECT 1").Scan(&n), n)
	w.say("close", conn.Close())
	_, err := w.db.Conn(canceled)
	w.say("conn on an ended context", err)
	w.stats("ended before")

	// The context ends in the middle of a statement, in every way to send one.
	for _, end := range []error{context.Canceled, context.DeadlineExceeded} {
		for _, way := range []struct {
			name string
			do   func(ctx context.Context, tag string) error
		}{
			{"exec", func(ctx context.Context, tag string) error { _, err := w.db.ExecContext(ctx, tag+query); return err }},
			{"query", func(ctx context.Context, tag string) error { return w.db.QueryRowContext(ctx, tag+query).Scan(&n) }},
			{"prepared", func(ctx context.Context, tag string) error {
				stmt, err := w.db.PrepareContext(w.Context(), tag+query)
				if err != nil {
					return err
				}
				defer stmt.Close()
				return stmt.QueryRowContext(ctx).Scan(&n)
			}},
			{"transaction", func(ctx context.Context, tag string) error {
				tx, err := w.db.BeginTx(ctx, nil)
				if err != nil {
					return err
				}
				_, err = tx.ExecContext(ctx, tag+query)
				_ = tx.Rollback()
				return err
			}},
			{"statement in a transaction that lives on", func(ctx context.Context, tag string) error {
				tx, err := w.db.BeginTx(w.Context(), nil)
				if err != nil {
					return err
				}
				_, err = tx.ExecContext(ctx, tag+query)
				w.sayLost("commit then", tx.Commit())
				return err
			}},
			{"wait for a lock", func(ctx context.Context, tag string) error {
				conn, err := w.db.Conn(w.Context())
				if err != nil {
					return err
				}
				defer conn.Close()
				_, err = conn.ExecContext(ctx, tag+"SELECT pg_advisory_lock($1)", 5)
				return err
			}},
			{"rows", func(ctx context.Context, tag string) error {
				rows, err := w.db.QueryContext(ctx, tag+"SELECT repeat('x', 1000), generate_series(1, 10000000)")
				if err != nil {
					return err
				}
				defer rows.Close()
				rows.Next()
				<-ctx.Done() // meanwhile the server cannot send more
				for rows.Next() {
				}
				return rows.Err()
			}},
		} {
			w.see.Lock(5)
			ctx := &endingContext{Context: w.Context(), done: make(chan struct{}), err: end}
			result := make(chan error)
			tag := fmt.Sprintf("/* %v, %s */ ", end, way.name)
			go func() { result <- way.do(ctx, tag) }()
			w.running(tag)
			ctx.end()
			err := <-result
			label := end.Error() + ", " + way.name
			// Whether rows end with the context's error or with pgx's, which
			// says that it is a timeout, is a race.
			w.say(label, text(strings.NewReplacer(" net timeout true", "", " pgx timeout", "").Replace(traits(err))), err != nil)
			w.see.Unlock(5)
			w.say(label+", then", w.db.QueryRowContext(w.Context(), "SELECT 1").Scan(&n), n)
			w.stats(label)
			w.see.WaitFor(5*time.Second, "nothing is held", func(l []pgtest.Lock) bool { return len(l) == 0 })
		}
	}

	// A transaction whose context ends while nothing runs.
	ctx, cancel := context.WithCancel(w.Context())
	tx, err := w.db.BeginTx(ctx, nil)
	must(w, err)
	w.see.Exec("DROP TABLE IF EXISTS kept")
	_, err = tx.ExecContext(ctx, "CREATE TABLE kept ()")
	must(w, err)
	cancel()
	pgtest.Eventually(w, 5*time.Second, "it is rolled back", func() bool { return w.db.Stats().InUse == 0 })
	w.say("commit after the end", tx.Commit())
	w.stats("context of a transaction")
	w.say("then", w.db.QueryRowContext(w.Context(), "SELECT count(*) FROM pg_tables WHERE tablename = 'kept'").Scan(&n), n)

	// The server's own limits.
	conn = w.conn()
	for _, set := range []string{"SET statement_timeout = 30", "SET lock_timeout = 30"} {
		w.see.Lock(6)
		_, err = conn.ExecContext(w.Context(), set)
		must(w, err)
		_, err = conn.ExecContext(w.Context(), "SELECT pg_advisory_lock(6)")
		w.say(set, err)
		w.say(set+", row", conn.QueryRowContext(w.Context(), "SELECT pg_advisory_lock(6)").Scan(new(any)))
		_, err = conn.ExecContext(w.Context(), "RESET ALL")
		must(w, err)
		w.see.Unlock(6)
	}
	w.say("close", conn.Close())
	w.held("limits")
	w.stats("limits")
}

// endedLocks sends lock statements on a context that ended before, as the first
// ones of their connection and not.
func endedLocks(w *witness) {
	ended, cancel := context.WithCancel(w.Context())
	cancel()
	for _, l := range []struct {
		query string
		args  []any
	}{
		{"SELECT pg_advisory_lock(1)", nil}, {"SELECT pg_advisory_lock($1)", []any{1}}, {"SELECT pg_try_advisory_lock(1)", nil}, {"SELECT pg_try_advisory_lock($1)", []any{1}},
		{"SELECT pg_advisory_unlock(1)", nil}, {"SELECT pg_advisory_unlock($1)", []any{1}}, {"SELECT pg_advisory_unlock_all()", nil}, {"SELECT pg_advisory_xact_lock(1)", nil},
		{"DO $$ BEGIN PERFORM pg_advisory_lock(1); END $$", nil},
	} {
		for _, first := range []bool{true, false} {
			for _, way := range []string{"exec", "query", "row", "prepare", "prepared exec", "prepared query", "in a transaction"} {
				label := fmt.Sprintf("%s %v, first %t, %s", l.query, l.args, first, way)
				conn := w.conn()
				if !first {
					_, err := conn.ExecContext(w.Context(), "SELECT pg_advisory_lock(2), pg_advisory_unlock(2)")
					must(w, err)
				}
				var err error
				switch way {
				case "exec":
					_, err = conn.ExecContext(ended, l.query, l.args...)
				case "query":
					_, err = conn.QueryContext(ended, l.query, l.args...)
				case "row":
					err = conn.QueryRowContext(ended, l.query, l.args...).Scan(new(any))
				case "prepare":
					_, err = conn.PrepareContext(ended, l.query)
				case "prepared exec", "prepared query":
					stmt, perr := conn.PrepareContext(w.Context(), l.query)
					must(w, perr)
					if way == "prepared exec" {
						_, err = stmt.ExecContext(ended, l.args...)
					} else {
						err = stmt.QueryRowContext(ended, l.args...).Scan(new(any))
					}
				case "in a transaction":
					tx, terr := conn.BeginTx(w.Context(), nil)
					must(w, terr)
					_, err = tx.ExecContext(ended, l.query, l.args...)
					must(w, tx.Rollback())
				}
				w.say(label, err)
				w.say(label+", then", conn.PingContext(w.Context()), conn.Close())
				w.held(label)
			}
		}
	}
	w.stats("ended locks")
}

// endingContext is a context that ends when it is told to, as if by cancel or
// by a deadline: a real deadline may pass before the statement is sent.
type endingContext struct {
	context.Context
	done  chan struct{}
	ended atomic.Bool
	err   error
}

func (c *endingContext) Done() <-chan struct{} { return c.done }

func (c *endingContext) Err() error {
	if c.ended.Load() {
		return c.err
	}
	return nil
}

func (c *endingContext) end() {
	c.ended.Store(true)
	close(c.done)
}

// running waits until the server works on the statement with the tag.
func (w *witness) running(tag string) {
	w.Helper()
	pgtest.Eventually(w, 10*time.Second, "the statement runs", func() (yes bool) {
		must(w, w.see.Conn().QueryRow(w.Context(), `SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database() AND state = 'active'
			AND starts_with(query, $1) AND wait_event IN ('PgSleep', 'advisory', 'ClientWrite')`, tag).Scan(&yes))
		return yes
	})
}

func transactions(w *witness) {
	w.see.Exec("DROP TABLE IF EXISTS written")
	w.see.Exec("CREATE TABLE written (n int)")
	for level := sql.LevelDefault; level <= sql.LevelLinearizable+1; level++ {
		for _, readOnly := range []bool{false, true} {
			label := fmt.Sprintf("%s, read only %t", level, readOnly)
			tx, err := w.db.BeginTx(w.Context(), &sql.TxOptions{Isolation: level, ReadOnly: readOnly})
			w.say(label, err)
			if err != nil {
				continue
			}
			var isolation, ro string
			w.say(label+", isolation", tx.QueryRow("SHOW transaction_isolation").Scan(&isolation), isolation)
			w.say(label+", read only", tx.QueryRow("SHOW transaction_read_only").Scan(&ro), ro)
			_, err = tx.Exec("SELECT pg_advisory_xact_lock(8)")
			w.say(label+", lock", err)
			_, err = tx.Exec("INSERT INTO written VALUES (1)")
			w.say(label+", write", err)
			w.held(label)
			_, err = tx.Exec("SELECT 1")
			w.say(label+", afterwards", err)
			w.say(label+", commit", tx.Commit())
			w.held(label + ", committed")
			w.stats(label)
		}
	}
	var n int
	w.say("written", w.db.QueryRow("SELECT count(*) FROM written").Scan(&n), n)

	// Savepoints, and transaction control in texts beside it.
	tx, err := w.db.Begin()
	must(w, err)
	for _, query := range []string{
		"SAVEPOINT a", "SELECT pg_advisory_xact_lock(1)", "SELECT 1/0", "SELECT 1", "ROLLBACK TO a", "SELECT pg_advisory_lock(2)", "ROLLBACK TO a", "RELEASE a",
		"SELECT pg_advisory_unlock(2)", "SELECT pg_advisory_unlock(2)", "COMMIT AND CHAIN", "SELECT pg_advisory_xact_lock(3)", "COMMIT; BEGIN", "ROLLBACK", "SELECT pg_advisory_xact_lock(4)", "SELECT 1",
	} {
		result, err := tx.Exec(query)
		w.result("text "+query, result, err)
		w.held("text " + query)
	}
	w.say("commit of what is none", tx.Commit())
	w.stats("texts")

	conn := w.conn()
	for _, query := range []string{"BEGIN ISOLATION LEVEL SERIALIZABLE", "SELECT pg_advisory_lock(1), pg_advisory_xact_lock(2)", "PREPARE p AS SELECT pg_advisory_unlock(1)", "EXECUTE p", "COMMIT",
		"start transaction read only", "END", "BEGIN", "SELECT 1/0", "SELECT pg_advisory_lock(1)", "COMMIT", "SET default_transaction_isolation = 'repeatable read'", "BEGIN", "SHOW transaction_isolation", "ABORT", "DISCARD ALL"} {
		result, err := conn.ExecContext(w.Context(), query)
		w.result("conn "+query, result, err)
		w.held("conn " + query)
	}
	ctx, cancel := context.WithCancel(w.Context())
	_, err = conn.BeginTx(ctx, nil)
	w.say("begin", err)
	_, err = conn.ExecContext(w.Context(), "SELECT 1")
	w.say("beside it", err)
	time.AfterFunc(30*time.Millisecond, cancel) // Close waits for the transaction
	w.say("close with a transaction open", conn.Close())

	tx, err = w.db.Begin()
	must(w, err)
	_, err = tx.Exec("SELECT 1/0")
	w.say("failed", err)
	w.say("commit of a failed one", tx.Commit())
	w.stats("failed")

	// Two in a way that one must give in, and a deferred constraint.
	w.see.Exec("DROP TABLE IF EXISTS later")
	w.see.Exec("CREATE TABLE later (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
	tx, err = w.db.Begin()
	must(w, err)
	_, err = tx.Exec("INSERT INTO later VALUES (1), (1)")
	w.say("deferred", err)
	w.say("deferred, commit", tx.Commit())
	tx, err = w.db.BeginTx(w.Context(), &sql.TxOptions{Isolation: sql.LevelSerializable})
	must(w, err)
	w.say("serializable read", tx.QueryRow("SELECT count(*) FROM later").Scan(&n), n)
	w.see.Exec("INSERT INTO later VALUES (5)")
	_, err = tx.Exec("UPDATE later SET n = 6")
	w.say("serializable write", err)
	w.say("serializable commit", tx.Commit())
	w.stats("the end")
}

func statements(w *witness) {
	ctx := w.Context()
	stmt, err := w.db.PrepareContext(ctx, "SELECT $1::int4 + 1, pg_backend_pid()")
	must(w, err)
	// On several connections at once: it is prepared anew on each.
	var pids sync.Map
	conns := []*sql.Conn{w.conn(), w.conn(), w.conn()}
	for i, conn := range conns {
		tx, err := conn.BeginTx(ctx, nil)
		must(w, err)
		var n, pid int
		w.say("in transaction", tx.StmtContext(ctx, stmt).QueryRow(i).Scan(&n, &pid), n)
		pids.Store(pid, true)
		w.say("in transaction, commit", tx.Commit())
	}
	count := 0
	pids.Range(func(any, any) bool { count++; return true })
	w.say("connections", count)
	for _, conn := range conns {
		must(w, conn.Close())
	}
	var wg sync.WaitGroup
	sums := make([]int, 8)
	for i := range sums {
		wg.Go(func() {
			for range 20 {
				var n int
				if err := stmt.QueryRow(i).Scan(&n, new(int)); err != nil {
					w.Error(err)
				}
				sums[i] += n
			}
		})
	}
	wg.Wait()
	w.say("at once", sums)
	// Its connections are gone: it is prepared again.
	w.kill()
	var n int
	_ = w.db.QueryRow("SELECT 1").Scan(&n) // one connection may have to be found dead
	for range 4 {
		if err = stmt.QueryRow(1).Scan(&n, new(int)); err == nil {
			break
		}
	}
	w.say("after its connections are gone", err, n)
	w.say("close", stmt.Close(), stmt.Close())

	// A table that changes under a prepared statement, and under a cache.
	w.see.Exec("DROP TABLE IF EXISTS changes")
	w.see.Exec("CREATE TABLE changes (a int)")
	w.see.Exec("INSERT INTO changes VALUES (1)")
	conn := w.conn()
	defer conn.Close()
	stmt, err = conn.PrepareContext(ctx, "SELECT * FROM changes")
	must(w, err)
	for _, alter := range []string{"ANALYZE changes", "ALTER TABLE changes ADD b int", "ALTER TABLE changes DROP a"} {
		w.see.Exec(alter)
		for range 3 {
			rows, err := stmt.QueryContext(ctx)
			w.say(alter+", prepared", err)
			if err == nil {
				w.scans(alter+", prepared", rows)
			}
			rows, err = conn.QueryContext(ctx, "SELECT * FROM changes")
			w.say(alter+", text", err)
			if err == nil {
				w.scans(alter+", text", rows)
			}
		}
	}
	// What the server calls them, and whether they are left behind.
	for _, query := range []string{"SELECT 1", "SELECT pg_advisory_lock(1), pg_advisory_unlock(1)", "SELECT pg_try_advisory_lock(1), pg_advisory_unlock(1)", "SELECT pg_advisory_unlock_all()"} {
		other := w.conn()
		count := func(label string) {
			w.say(query+", "+label, other.QueryRowContext(ctx, "SELECT count(*) FROM pg_prepared_statements WHERE statement = '"+query+"'").Scan(&n), n)
		}
		_, err := other.ExecContext(ctx, query)
		must(w, err)
		count("exec")
		rows, err := other.QueryContext(ctx, query)
		must(w, err)
		must(w, rows.Close())
		count("query")
		s, err := other.PrepareContext(ctx, query)
		must(w, err)
		count("prepared")
		must(w, s.Close())
		count("closed")
		must(w, other.Close())
	}
}

func large(w *witness) {
	ctx := w.Context()
	long := strings.Repeat("häß\n", 1<<18)
	var text string
	var sum string
	must(w, w.db.QueryRowContext(ctx, "SELECT $1::text, md5($1)", long).Scan(&text, &sum))
	w.say("text", len(text), text == long, sum)
	raw := make([]byte, 4<<20)
	for i := range raw {
		raw[i] = byte(i * i >> 3)
	}
	var back []byte
	must(w, w.db.QueryRowContext(ctx, "SELECT $1::bytea", raw).Scan(&back))
	w.say("bytea", len(back), slices.Equal(raw, back))
	rows, err := w.db.QueryContext(ctx, "SELECT n, repeat('x', n % 100) FROM generate_series(1, 50000) n")
	must(w, err)
	total := 0
	for rows.Next() {
		var n int
		var s sql.RawBytes
		must(w, rows.Scan(&n, &s))
		total += n + len(s)
	}
	w.say("rows", total, rows.Err())
	columns := make([]string, 1600)
	dests := make([]any, len(columns))
	for i := range columns {
		columns[i] = fmt.Sprint(i)
		dests[i] = new(int)
	}
	w.say("columns", w.db.QueryRowContext(ctx, "SELECT "+strings.Join(columns, ", ")).Scan(dests...), *dests[1599].(*int))
	for _, n := range []int{10000, 65535, 65536} {
		args := make([]any, n)
		marks := make([]string, n)
		for i := range args {
			args[i], marks[i] = i, fmt.Sprintf("$%d::int", i+1)
		}
		var count int
		w.say(fmt.Sprint(n, " arguments"), w.db.QueryRowContext(ctx, "SELECT cardinality(ARRAY["+strings.Join(marks, ",")+"])", args...).Scan(&count), count)
	}
	// A long text that only mentions a lock, and one that has a call behind it.
	comment := "/* pg_advisory_lock(1) " + strings.Repeat("x", 1<<20) + " */"
	var n int
	w.say("long comment", w.db.QueryRowContext(ctx, comment+" SELECT 1").Scan(&n), n)
	conn := w.conn()
	var got bool
	w.say("long lock statement", conn.QueryRowContext(ctx, comment+" SELECT pg_try_advisory_lock(1)").Scan(&got), got)
	w.held("long lock statement")
	_, err = conn.ExecContext(ctx, "SELECT pg_advisory_unlock(1)")
	must(w, err)
	must(w, conn.Close())
	w.held("after it")
	w.stats("large")
}

// throughRaw uses what database/sql has no words for.
func throughRaw(w *witness) {
	ctx := w.Context()
	w.see.Exec("DROP TABLE IF EXISTS copied")
	w.see.Exec("CREATE TABLE copied (n int, s text)")
	raw := func(do func(*pgx.Conn) error) error {
		conn := w.conn()
		defer conn.Close()
		return conn.Raw(func(c any) error { return do(c.(interface{ Conn() *pgx.Conn }).Conn()) })
	}
	w.say("copy", raw(func(c *pgx.Conn) error {
		n, err := c.CopyFrom(ctx, pgx.Identifier{"copied"}, []string{"n", "s"}, pgx.CopyFromSlice(1000, func(i int) ([]any, error) { return []any{i, fmt.Sprint(i)}, nil }))
		w.say("copied", n)
		return err
	}))
	w.say("copy of what does not fit", raw(func(c *pgx.Conn) error {
		_, err := c.CopyFrom(ctx, pgx.Identifier{"copied"}, []string{"n"}, pgx.CopyFromRows([][]any{{"x"}}))
		return err
	}))
	w.say("listen", raw(func(c *pgx.Conn) error {
		if _, err := c.Exec(ctx, "LISTEN heard"); err != nil {
			return err
		}
		w.see.Exec("NOTIFY heard, 'so'")
		n, err := c.WaitForNotification(ctx)
		if err == nil {
			w.say("heard", n.Channel, n.Payload)
		}
		return errors.Join(err, func() error { _, err := c.Exec(ctx, "UNLISTEN *"); return err }())
	}))
	w.say("batch", raw(func(c *pgx.Conn) error {
		batch := &pgx.Batch{}
		batch.Queue("SELECT 1")
		batch.Queue("SELECT count(*) FROM copied")
		results := c.SendBatch(ctx, batch)
		var one, n int
		err := errors.Join(results.QueryRow().Scan(&one), results.QueryRow().Scan(&n))
		w.say("batched", one, n)
		return errors.Join(err, results.Close())
	}))
	w.say("type", raw(func(c *pgx.Conn) error {
		t, err := c.LoadType(ctx, "conformance.pair")
		if err == nil {
			c.TypeMap().RegisterType(t)
		}
		return err
	}))
	w.say("own error", raw(func(*pgx.Conn) error { return errors.New("own") }))
	w.say("closed", raw(func(c *pgx.Conn) error { return c.Close(ctx) }))
	w.stats("raw")
	var n int
	w.say("then", w.db.QueryRow("SELECT count(*) FROM copied").Scan(&n), n)
	w.stats("raw, then")
}

// copyIn is lib/pq's way to COPY: a statement whose Execs are rows.
func copyIn(w *witness) {
	w.see.Exec("DROP TABLE IF EXISTS copied")
	w.see.Exec("CREATE TABLE copied (n int, s text)")
	tx, err := w.db.Begin()
	must(w, err)
	stmt, err := tx.Prepare(`COPY "copied" ("n", "s") FROM STDIN`) // what pq.CopyIn writes
	w.say("prepare", err)
	must(w, err)
	for i := range 1000 {
		_, err := stmt.Exec(i, fmt.Sprint(i))
		must(w, err)
	}
	result, err := stmt.Exec()
	w.result("flush", result, err)
	w.say("close", stmt.Close())
	w.say("commit", tx.Commit())
	tx, err = w.db.Begin()
	must(w, err)
	stmt, err = tx.Prepare(`COPY "copied" ("n") FROM STDIN`)
	must(w, err)
	_, err = stmt.Exec("x")
	w.say("what does not fit", err)
	_, err = stmt.Exec()
	w.say("what does not fit, flush", err)
	w.say("close", stmt.Close())
	w.say("rollback", tx.Rollback())
	var n int
	w.say("copied", w.db.QueryRow("SELECT count(*) FROM copied").Scan(&n), n)
	w.stats("copy")
}
