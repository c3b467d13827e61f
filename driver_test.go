package pgadvlock_test

// The main job on real servers, asserted on what another connection sees.

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"go.uber.org/goleak"

	"github.com/pgadvlock/pgadvlock"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// The servers' watchers live as long as the test binary.
		goleak.IgnoreAnyFunction("github.com/pgadvlock/pgadvlock/internal/pgtest.(*sandbox).start.func1"),
		goleak.IgnoreTopFunction("os/exec.(*Cmd).Wait"), goleak.IgnoreAnyFunction("os.(*Process).Wait"))
}

// recorder keeps the events of a test.
type recorder struct {
	mu     sync.Mutex
	events []pgadvlock.Event
}

func (r *recorder) handle(_ context.Context, e pgadvlock.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
}

func (r *recorder) all() []pgadvlock.Event {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.events)
}

// of returns the events of one rule.
func (r *recorder) of(rule pgadvlock.Rule) []pgadvlock.Event {
	return slices.DeleteFunc(r.all(), func(e pgadvlock.Event) bool { return e.Rule != rule })
}

// bench is what a test works with: a database of its own, a pool on it, and
// another connection that looks on.
type bench struct {
	dsn string
	db  *sql.DB
	see *pgtest.Observer
	rec *recorder
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// setUp opens a pool with the options on a fresh database of the shared
// server.
func setUp(t *testing.T, opts ...pgadvlock.Option) bench {
	t.Helper()
	server := pgtest.Shared(t)
	return setUpOn(t, server.DSN(server.NewDB(t)), opts...)
}

func setUpOn(t *testing.T, dsn string, opts ...pgadvlock.Option) bench {
	t.Helper()
	b := bench{dsn: dsn, rec: &recorder{}, see: pgtest.Observe(t, dsn)}
	b.db = openDB(t, dsn, b.rec, opts...)
	return b
}

func openDB(t *testing.T, dsn string, rec *recorder, opts ...pgadvlock.Option) *sql.DB {
	t.Helper()
	c, err := pgadvlock.NewConnector(dsn, append([]pgadvlock.Option{
		pgadvlock.WithEventHandler(rec.handle), pgadvlock.WithLogger(quiet())}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	db := sql.OpenDB(c)
	t.Cleanup(func() { db.Close() })
	return db
}

func ctxFor(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// execer is a *sql.DB, *sql.Conn, *sql.Tx.
type execer interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
}

func mustExec(t *testing.T, x execer, query string, args ...any) {
	t.Helper()
	if _, err := x.ExecContext(ctxFor(t), query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

func mustConn(t *testing.T, db *sql.DB) *sql.Conn {
	t.Helper()
	conn, err := db.Conn(ctxFor(t))
	must(t, err)
	return conn
}

// raw runs f on the pgx connection under conn.
func raw(t *testing.T, conn *sql.Conn, f func(*pgx.Conn) error) {
	t.Helper()
	must(t, conn.Raw(func(c any) error { return f(c.(interface{ Conn() *pgx.Conn }).Conn()) }))
}

// A leak is a program that gives its connection back and still holds a lock.
// The locks it takes are the key 42, the pair (4, 2), or both.
type leak struct {
	name string
	opts []pgadvlock.Option
	run  func(t *testing.T, db *sql.DB)
	// closes says that pgx closes the connection, which frees the locks when
	// the server notices.
	closes bool
	// dropped says that database/sql closes the connection: that nothing is
	// held afterwards does not wait for the server to notice.
	dropped bool
	// silent says that there is nothing to report: no session lock was taken,
	// or nobody could see it.
	silent bool
}

func onConn(statements ...string) func(*testing.T, *sql.DB) {
	return func(t *testing.T, db *sql.DB) {
		conn := mustConn(t, db)
		defer conn.Close()
		for _, s := range statements {
			mustExec(t, conn, s)
		}
	}
}

// unjudged lets statements go through *sql.DB, as they do on plain pgx.
var unjudged = []pgadvlock.Option{pgadvlock.WithRule(pgadvlock.RulePooledSessionLock, pgadvlock.LevelOff)}

var leaks = []leak{
	{name: "exclusive", run: onConn("SELECT pg_advisory_lock(42)")},
	{name: "share", run: onConn("SELECT pg_advisory_lock_shared(42)")},
	{name: "pair", run: onConn("SELECT pg_advisory_lock(4, 2)")},
	{name: "both modes and spaces", run: onConn("SELECT pg_advisory_lock(42), pg_advisory_lock_shared(42), pg_advisory_lock_shared(4, 2)")},
	{name: "three times", run: onConn("SELECT pg_advisory_lock(42)", "SELECT pg_advisory_lock(42)", "SELECT pg_advisory_lock(42)")},
	{name: "try", run: onConn("SELECT pg_try_advisory_lock(42)")},
	{name: "one unlock too few", run: onConn("SELECT pg_advisory_lock(42)", "SELECT pg_advisory_lock(42)", "SELECT pg_advisory_unlock(42)")},
	{name: "wrong key unlocked", run: onConn("SELECT pg_advisory_lock(42)", "SELECT pg_advisory_unlock(43)")},
	{name: "wrong mode unlocked", run: onConn("SELECT pg_advisory_lock(42)", "SELECT pg_advisory_unlock_shared(42)")},
	{name: "through the pool", opts: unjudged, run: func(t *testing.T, db *sql.DB) { mustExec(t, db, "SELECT pg_advisory_lock(42)") }},
	{name: "with an argument", opts: unjudged, run: func(t *testing.T, db *sql.DB) { mustExec(t, db, "SELECT pg_advisory_lock($1)", 42) }},
	{name: "by expression", opts: unjudged, run: func(t *testing.T, db *sql.DB) {
		mustExec(t, db, "SELECT pg_advisory_lock(hashtext($1))", "refunds")
	}},
	{name: "QueryRow", opts: unjudged, run: func(t *testing.T, db *sql.DB) {
		var got bool
		must(t, db.QueryRowContext(ctxFor(t), "SELECT pg_try_advisory_lock($1)", 42).Scan(&got))
		if !got {
			t.Error("the lock was not granted")
		}
	}},
	{name: "rows closed early", run: func(t *testing.T, db *sql.DB) {
		rows, err := db.QueryContext(ctxFor(t), "SELECT pg_advisory_lock(42) FROM generate_series(1, 500)")
		must(t, err)
		rows.Next()
		must(t, rows.Close())
	}},
	{name: "prepared", run: func(t *testing.T, db *sql.DB) {
		stmt, err := db.PrepareContext(ctxFor(t), "SELECT pg_advisory_lock($1)")
		must(t, err)
		defer stmt.Close()
		_, err = stmt.ExecContext(ctxFor(t), 42)
		must(t, err)
	}},
	{name: "prepared, opaque", run: func(t *testing.T, db *sql.DB) {
		stmt, err := db.PrepareContext(ctxFor(t), "SELECT pg_advisory_lock($1) FROM generate_series(1, 2)")
		must(t, err)
		defer stmt.Close()
		_, err = stmt.ExecContext(ctxFor(t), 42)
		must(t, err)
	}},
	{name: "in a transaction that committed", run: func(t *testing.T, db *sql.DB) {
		tx, err := db.BeginTx(ctxFor(t), nil)
		must(t, err)
		mustExec(t, tx, "SELECT pg_advisory_lock(42)")
		must(t, tx.Commit())
	}},
	{name: "in a transaction that rolled back", run: func(t *testing.T, db *sql.DB) {
		tx, err := db.BeginTx(ctxFor(t), nil)
		must(t, err)
		mustExec(t, tx, "SELECT pg_advisory_lock(42)")
		must(t, tx.Rollback())
	}},
	{name: "in a failed transaction", run: func(t *testing.T, db *sql.DB) {
		tx, err := db.BeginTx(ctxFor(t), nil)
		must(t, err)
		mustExec(t, tx, "SELECT pg_advisory_lock(42)")
		if _, err := tx.ExecContext(ctxFor(t), "SELECT 1/0"); err == nil {
			t.Error("1/0 succeeded")
		}
		if _, err := tx.ExecContext(ctxFor(t), "SELECT pg_advisory_unlock(42)"); err == nil {
			t.Error("a statement in a failed transaction succeeded")
		}
		must(t, tx.Rollback())
	}},
	{name: "in a transaction left open", run: onConn("BEGIN", "SELECT pg_advisory_lock(42)")},
	{name: "in a failed transaction left open", run: func(t *testing.T, db *sql.DB) {
		conn := mustConn(t, db)
		defer conn.Close()
		mustExec(t, conn, "BEGIN")
		mustExec(t, conn, "SELECT pg_advisory_lock(42)")
		if _, err := conn.ExecContext(ctxFor(t), "SELECT 1/0"); err == nil {
			t.Error("1/0 succeeded")
		}
	}},
	{name: "in DO", run: onConn("DO $$ BEGIN PERFORM pg_advisory_lock(42); END $$")},
	{name: "in DO that fails after it", run: func(t *testing.T, db *sql.DB) {
		if _, err := db.ExecContext(ctxFor(t), "DO $$ BEGIN PERFORM pg_advisory_lock(42); RAISE 'no'; END $$"); err == nil {
			t.Error("RAISE succeeded")
		}
	}},
	{name: "in a CTE, twice", run: onConn("WITH l AS MATERIALIZED (SELECT pg_advisory_lock(42) FROM generate_series(1, 2)) SELECT count(*) FROM l", "SELECT pg_advisory_unlock(42)")},
	{name: "beside LIMIT", run: onConn("SELECT pg_try_advisory_lock(4, i) FROM generate_series(1, 20) i WHERE i % 5 = 0 ORDER BY i LIMIT 2")},
	{name: "in WHERE beside LIMIT", run: onConn("SELECT i FROM generate_series(1, 20) i WHERE pg_try_advisory_lock(4, i) AND i % 5 = 0 ORDER BY i LIMIT 2")},
	{name: "in multi-statement text that fails after it", run: func(t *testing.T, db *sql.DB) {
		if _, err := db.ExecContext(ctxFor(t), "SELECT pg_advisory_lock(42); SELECT 1/0"); err == nil {
			t.Error("1/0 succeeded")
		}
	}},
	{name: "in PREPARE and EXECUTE across two uses", run: func(t *testing.T, db *sql.DB) {
		db.SetMaxOpenConns(1)
		onConn("PREPARE p AS SELECT pg_advisory_lock(42)")(t, db)
		onConn("EXECUTE p")(t, db)
		onConn("EXECUTE p", "SELECT pg_advisory_unlock_all()", "EXECUTE p")(t, db)
	}},
	{name: "in a cursor", run: onConn("BEGIN", "DECLARE c CURSOR WITH HOLD FOR SELECT pg_advisory_lock(42)", "SELECT pg_advisory_unlock_all()", "COMMIT")},
	{name: "in COPY", run: onConn("COPY (SELECT pg_advisory_lock(42)) TO STDOUT")},
	{name: "in EXPLAIN ANALYZE", run: onConn("EXPLAIN ANALYZE SELECT pg_advisory_lock(42)")},
	{name: "through Raw", run: func(t *testing.T, db *sql.DB) {
		conn := mustConn(t, db)
		defer conn.Close()
		raw(t, conn, func(c *pgx.Conn) error {
			_, err := c.Exec(ctxFor(t), "SELECT pg_advisory_lock($1)", 42)
			return err
		})
	}},
	{name: "through Raw in a batch", run: func(t *testing.T, db *sql.DB) {
		conn := mustConn(t, db)
		defer conn.Close()
		raw(t, conn, func(c *pgx.Conn) error {
			var b pgx.Batch
			b.Queue("SELECT pg_advisory_lock(42)")
			b.Queue("SELECT 1")
			return c.SendBatch(ctxFor(t), &b).Close()
		})
	}},
	{name: "through Raw with rows left open", closes: true, silent: true, run: func(t *testing.T, db *sql.DB) {
		conn := mustConn(t, db)
		defer conn.Close()
		raw(t, conn, func(c *pgx.Conn) error {
			rows, err := c.Query(ctxFor(t), "SELECT pg_advisory_lock(42) FROM generate_series(1, 3)")
			rows.Next()
			return err
		})
	}},
	{name: "before a panic in Raw", dropped: true, run: func(t *testing.T, db *sql.DB) {
		conn := mustConn(t, db)
		defer conn.Close()
		mustExec(t, conn, "SELECT pg_advisory_lock(42)")
		defer func() {
			if recover() == nil {
				t.Error("no panic")
			}
		}()
		_ = conn.Raw(func(any) error { panic("no") })
	}},
	{name: "before an ErrBadConn in Raw", dropped: true, run: func(t *testing.T, db *sql.DB) {
		conn := mustConn(t, db)
		mustExec(t, conn, "BEGIN")
		mustExec(t, conn, "SELECT pg_advisory_lock(42), pg_advisory_xact_lock(43)")
		if err := conn.Raw(func(any) error { return driver.ErrBadConn }); !errors.Is(err, driver.ErrBadConn) {
			t.Errorf("error %v", err)
		}
	}},
	{name: "in a server-side function, reset_when=always", opts: []pgadvlock.Option{pgadvlock.WithResetWhen(pgadvlock.ResetAlways)},
		run: func(t *testing.T, db *sql.DB) {
			// The definition mentions a lock, and runs nothing.
			mustExec(t, db, "CREATE FUNCTION take() RETURNS void LANGUAGE sql AS 'SELECT pg_advisory_lock(42)'")
			time.Sleep(1100 * time.Millisecond) // past the ration of reports, to have one for this
			onConn("SELECT take()")(t, db)
		}},
	{name: "in a server-side function, named", opts: []pgadvlock.Option{pgadvlock.WithFunctions("take")},
		run: func(t *testing.T, db *sql.DB) {
			mustExec(t, db, "CREATE FUNCTION take() RETURNS void LANGUAGE sql AS 'SELECT pg_advisory_lock(42)'")
			onConn("SELECT take()")(t, db)
		}},
	{name: "with an unlock whose context was over", dropped: true, run: func(t *testing.T, db *sql.DB) {
		conn := mustConn(t, db)
		defer conn.Close()
		ctx, cancel := context.WithCancel(ctxFor(t))
		mustExec(t, conn, "SELECT pg_advisory_lock(42)")
		cancel()
		if _, err := conn.ExecContext(ctx, "SELECT pg_advisory_unlock(42)"); !errors.Is(err, driver.ErrBadConn) { // as on pgx
			t.Errorf("unlock on a cancelled context: %v", err)
		}
	}},
	{name: "with an unlock, as a query, whose context was over", run: func(t *testing.T, db *sql.DB) {
		conn := mustConn(t, db)
		defer conn.Close()
		mustExec(t, conn, "SELECT pg_advisory_lock(42)")
		stmt, err := conn.PrepareContext(ctxFor(t), "SELECT pg_advisory_unlock(42)")
		must(t, err)
		ctx, cancel := context.WithCancel(ctxFor(t))
		cancel()
		if err := stmt.QueryRowContext(ctx).Scan(new(bool)); !errors.Is(err, context.Canceled) {
			t.Errorf("unlock on a cancelled context: %v", err)
		}
	}},
	{name: "in a transaction whose context was cancelled", closes: true, silent: true, run: func(t *testing.T, db *sql.DB) {
		ctx, cancel := context.WithCancel(ctxFor(t))
		tx, err := db.BeginTx(ctx, nil)
		must(t, err)
		mustExec(t, tx, "SELECT pg_advisory_lock(42)")
		cancel()
		_ = tx.Rollback() // database/sql rolls back on its own as well
	}},
	{name: "transaction lock only", silent: true, run: func(t *testing.T, db *sql.DB) {
		tx, err := db.BeginTx(ctxFor(t), nil)
		must(t, err)
		mustExec(t, tx, "SELECT pg_advisory_xact_lock(42)")
		must(t, tx.Commit())
	}},
}

func TestNothingLeaks(t *testing.T) {
	for _, l := range leaks {
		t.Run(l.name, func(t *testing.T) {
			b := setUp(t, l.opts...)
			l.run(t, b.db)
			assertNothingHeld(t, b, l)
			if reported := len(b.rec.of(pgadvlock.RuleLeakedSessionLock)) > 0; reported == l.silent && !l.closes {
				t.Errorf("leaked-session-lock reported: %t, events: %v", reported, b.rec.all())
			}
			mustExec(t, b.db, "SELECT 1")
		})
	}
}

func assertNothingHeld(t *testing.T, b bench, l leak) {
	t.Helper()
	if l.closes {
		b.see.WaitFor(time.Second, "nothing is held", func(locks []pgtest.Lock) bool { return len(locks) == 0 })
		return
	}
	if locks := b.see.Locks(); len(locks) > 0 {
		t.Fatalf("after the return the server still shows %v", locks)
	}
	if n := b.db.Stats().Idle; n == 0 && !l.dropped && !strings.Contains(l.name, "left open") {
		t.Error("the connection was not kept")
	}
}

// Over pgxpool, closing the driver's connection hands it to another pool: a
// connection that is given up must be closed itself.
func TestNothingLeaksOverPgxpool(t *testing.T) {
	for _, l := range leaks {
		t.Run(l.name, func(t *testing.T) {
			server := pgtest.Shared(t)
			dsn := server.DSN(server.NewDB(t))
			pool, err := pgxpool.New(ctxFor(t), dsn)
			must(t, err)
			t.Cleanup(pool.Close)
			c, err := pgadvlock.WrapConnector(stdlib.GetPoolConnector(pool), append(l.opts, pgadvlock.WithLogger(quiet()))...)
			must(t, err)
			db := sql.OpenDB(c)
			t.Cleanup(func() { db.Close() })
			db.SetMaxIdleConns(0) // as stdlib.OpenDBFromPool does
			if strings.Contains(l.name, "across two uses") {
				db.SetMaxIdleConns(1) // what is PREPAREd belongs to a connection
			}
			l.run(t, db)
			see := pgtest.Observe(t, dsn)
			if l.closes {
				see.WaitFor(time.Second, "nothing is held", func(locks []pgtest.Lock) bool { return len(locks) == 0 })
			} else if locks := see.Locks(); len(locks) > 0 {
				t.Errorf("after the return the server still shows %v", locks)
			}
			mustExec(t, db, "SELECT 1")
		})
	}
}

// The exact account names everything: key, mode, count, since when, and the
// line that took the lock.
func TestLeakIsReportedWithItsCallSite(t *testing.T) {
	b := setUp(t)
	before := time.Now()
	conn := mustConn(t, b.db)
	mustExec(t, conn, "SELECT pg_advisory_lock_shared(1, 9527)")
	mustExec(t, conn, "SELECT pg_advisory_lock_shared(1, 9527)")
	pid := backendPID(t, conn)
	must(t, conn.Close())

	events := b.rec.all()
	if len(events) != 1 {
		t.Fatalf("events: %v", events)
	}
	e := events[0]
	if e.Rule != pgadvlock.RuleLeakedSessionLock || e.Level != pgadvlock.LevelWarn || e.Err != nil || e.PoolMode != pgadvlock.PoolDirect || e.BackendPID != pid {
		t.Errorf("event %+v", e)
	}
	if len(e.Locks) != 1 {
		t.Fatalf("locks: %+v", e.Locks)
	}
	l := e.Locks[0]
	if l.Key.String() != "(1, 9527)" || l.Mode != pgadvlock.ShareLock || l.Scope != pgadvlock.ScopeSession || l.Count != 2 ||
		l.Since.Before(before) || l.Since.After(e.Time) {
		t.Errorf("lock %+v", l)
	}
	if !strings.HasSuffix(l.Caller.Function, "pgadvlock_test.mustExec") || !strings.HasSuffix(l.Caller.File, "driver_test.go") || l.Caller.Line == 0 || e.Caller != l.Caller {
		t.Errorf("caller %v", l.Caller)
	}
}

func backendPID(t *testing.T, conn *sql.Conn) (pid uint32) {
	t.Helper()
	must(t, conn.QueryRowContext(ctxFor(t), "SELECT pg_backend_pid()").Scan(&pid))
	return pid
}

// A tainted connection is reported from pg_locks, with what the ledger knows.
func TestTaintedLeakIsReportedFromTheServer(t *testing.T) {
	b := setUp(t)
	onConn("SELECT pg_advisory_lock(7)", "DO $$ BEGIN PERFORM pg_advisory_lock(-42); PERFORM pg_advisory_lock_shared(-1, -2); END $$")(t, b.db)
	events := b.rec.all()
	if len(events) != 1 {
		t.Fatalf("events: %v", events)
	}
	var got []string
	for _, l := range events[0].Locks {
		got = append(got, l.Key.String()+" "+l.Mode.String())
		if known := l.Caller.Line != 0; known != (l.Key.String() == "7") {
			t.Errorf("caller of %v: %v", l.Key, l.Caller)
		}
	}
	slices.Sort(got)
	if want := []string{"(-1, -2) share", "-42 exclusive", "7 exclusive"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestUnlockNotHeld(t *testing.T) {
	for _, c := range []struct{ lock, unlock string }{
		{"SELECT pg_advisory_lock(42)", "SELECT pg_advisory_unlock(43)"},
		{"SELECT pg_advisory_lock(42)", "SELECT pg_advisory_unlock_shared(42)"},
		{"SELECT pg_advisory_lock(0, 42)", "SELECT pg_advisory_unlock(42)"},
	} {
		t.Run(c.unlock, func(t *testing.T) {
			b := setUp(t)
			conn := mustConn(t, b.db)
			defer conn.Close()
			mustExec(t, conn, c.lock)
			mustExec(t, conn, c.unlock)
			events := b.rec.of(pgadvlock.RuleUnlockNotHeld)
			if len(events) != 1 || len(events[0].Locks) != 2 {
				t.Fatalf("events: %+v", events)
			}
			wrong, held := events[0].Locks[0], events[0].Locks[1]
			if wrong.Count != 0 || held.Count != 1 || held.Caller.Line == 0 || wrong.Key == held.Key && wrong.Mode == held.Mode {
				t.Errorf("asked for %+v, holds %+v", wrong, held)
			}
		})
	}
	t.Run("at error the caller gets it", func(t *testing.T) {
		b := setUp(t, pgadvlock.WithRule(pgadvlock.RuleUnlockNotHeld, pgadvlock.LevelError))
		conn := mustConn(t, b.db)
		defer conn.Close()
		_, err := conn.ExecContext(ctxFor(t), "SELECT pg_advisory_unlock($1)", 43)
		var ruleErr *pgadvlock.RuleError
		if !errors.Is(err, pgadvlock.RuleUnlockNotHeld) || !errors.As(err, &ruleErr) {
			t.Fatalf("error %v", err)
		}
		for _, want := range []string{"unlock-not-held", "lock 43", "driver_test.go:", "*sql.Conn"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q is missing in: %v", want, err)
			}
		}
	})
}

// A lock on a connection that is still in use is nobody's business.
// Where a release comes from is found out only when somebody asks, and what the
// stack says is remembered; the caller is named all the same.
func TestReleasesNameTheirCaller(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	conn := mustConn(t, b.db)
	for range 2 {
		mustExec(t, conn, "SELECT pg_advisory_lock(1)")
		_, _, line, _ := runtime.Caller(0)
		_, err := conn.ExecContext(ctxFor(t), "SELECT pg_advisory_unlock(2)")
		must(t, err)
		events := b.rec.of(pgadvlock.RuleUnlockNotHeld)
		e := events[len(events)-1]
		if e.Caller.Line != line+1 || !strings.HasSuffix(e.Caller.Function, ".TestReleasesNameTheirCaller") || e.Locks[0].Caller != e.Caller {
			t.Errorf("line %d: %v, %v", line+1, e.Caller, e.Locks)
		}
	}
	must(t, conn.Close())

	for range 2 { // on the connection that has sent releases before
		if err := b.db.QueryRowContext(ctxFor(t), "SELECT pg_advisory_unlock(3)").Err(); !errors.Is(err, pgadvlock.RulePooledSessionLock) {
			t.Errorf("%v", err)
		}
		if _, err := b.db.Exec("SELECT pg_advisory_unlock_all()"); !errors.Is(err, pgadvlock.RulePooledSessionLock) {
			t.Errorf("%v", err)
		}
	}
}

func TestHeldLocksAreLeftAlone(t *testing.T) {
	b := setUp(t)
	conn := mustConn(t, b.db)
	defer conn.Close()
	mustExec(t, conn, "SELECT pg_advisory_lock(42)")
	for _, s := range []string{
		"SELECT 1", "BEGIN", "SAVEPOINT a", "ROLLBACK TO a", "COMMIT", "CREATE TEMP TABLE t (i int)", "INSERT INTO t VALUES (1)",
		"SELECT pg_try_advisory_lock(43)", "SELECT pg_advisory_unlock(43)", "BEGIN ISOLATION LEVEL SERIALIZABLE", "ROLLBACK",
		"PREPARE p AS SELECT 1", "EXECUTE p", "DEALLOCATE ALL", "BEGIN", "SELECT pg_advisory_xact_lock(44)", "ROLLBACK", "/* pg_advisory_unlock_all() */ SELECT 1",
		"DO $$ BEGIN PERFORM 1; END $$", "COPY (SELECT 1) TO STDOUT", "EXPLAIN SELECT pg_advisory_unlock(42)", "LISTEN c",
	} {
		mustExec(t, conn, s)
		if !b.see.Held(42) {
			t.Fatalf("after %q the lock is gone", s)
		}
	}
	_, _ = conn.ExecContext(ctxFor(t), "SELECT 1/0")
	raw(t, conn, func(c *pgx.Conn) error { return c.Ping(ctxFor(t)) })
	if !b.see.Held(42) {
		t.Fatal("the lock is gone")
	}
	tx, err := conn.BeginTx(ctxFor(t), nil)
	must(t, err)
	must(t, tx.Rollback())
	if !b.see.Held(42) {
		t.Fatal("after a transaction the lock is gone")
	}
	if events := b.rec.all(); len(events) > 0 {
		t.Errorf("events: %v", events)
	}
}

func TestSessionsTellWhatIsHeldAndWaitedFor(t *testing.T) {
	b := setUp(t)
	c, ok := pgadvlock.ConnectorOf(b.db)
	if !ok {
		t.Fatal("no Connector")
	}
	if s := c.Sessions(); len(s) != 0 {
		t.Fatalf("sessions of an unused pool: %+v", s)
	}
	holder, waiter := mustConn(t, b.db), mustConn(t, b.db)
	defer holder.Close()
	defer waiter.Close()
	mustExec(t, holder, "SELECT pg_advisory_lock(42)")
	waited := make(chan error, 1)
	go func() {
		_, err := waiter.ExecContext(context.Background(), "SELECT pg_advisory_lock_shared(42)")
		waited <- err
	}()
	b.see.WaitFor(5*time.Second, "a waiter", func([]pgtest.Lock) bool { return b.see.Waiting(42) })

	var held, waiting []pgadvlock.Lock
	for _, s := range c.Sessions() {
		held, waiting = append(held, s.Held...), append(waiting, s.Waiting...)
		if s.PoolMode != pgadvlock.PoolDirect || s.BackendPID == 0 || s.Exact != (len(s.Held) > 0) {
			t.Errorf("session %+v", s)
		}
	}
	if len(held) != 1 || held[0].Mode != pgadvlock.ExclusiveLock || len(waiting) != 1 || waiting[0].Mode != pgadvlock.ShareLock {
		t.Errorf("held %+v, waiting %+v", held, waiting)
	}
	mustExec(t, holder, "SELECT pg_advisory_unlock(42)")
	must(t, <-waited)
	mustExec(t, waiter, "SELECT pg_advisory_unlock_shared(42)")
	if s := c.Sessions(); len(s) != 0 {
		t.Errorf("sessions at the end: %+v", s)
	}
}

// What comes back is what pgx gives.
func TestResultsReachTheCallerUnchanged(t *testing.T) {
	b := setUp(t, unjudged...)
	plain, err := sql.Open("pgx", b.dsn)
	must(t, err)
	defer plain.Close()
	ctx := ctxFor(t)
	for _, q := range []string{
		"SELECT pg_advisory_lock(42)", "SELECT pg_try_advisory_lock(42) AS got", "SELECT pg_advisory_unlock(4), pg_advisory_unlock_all()",
		"SELECT pg_try_advisory_xact_lock(NULL)", "SELECT pg_advisory_lock(42) FROM generate_series(1, 3)",
	} {
		var got [2]struct {
			rows     [][]any
			types    []string
			affected int64
		}
		for i, db := range []*sql.DB{plain, b.db} {
			rows, err := db.QueryContext(ctx, q)
			must(t, err)
			types, err := rows.ColumnTypes()
			must(t, err)
			for _, c := range types {
				length, hasLength := c.Length()
				nullable, knowsNullable := c.Nullable()
				got[i].types = append(got[i].types, strings.Join([]string{c.Name(), c.DatabaseTypeName(), c.ScanType().String()}, " "))
				if hasLength || length != 0 || nullable || knowsNullable {
					t.Errorf("%s: length %d %t, nullable %t %t", q, length, hasLength, nullable, knowsNullable)
				}
			}
			for rows.Next() {
				row := make([]any, len(types))
				dest := make([]any, len(types))
				for j := range row {
					dest[j] = &row[j]
				}
				must(t, rows.Scan(dest...))
				got[i].rows = append(got[i].rows, row)
			}
			must(t, rows.Err())
			res, err := db.ExecContext(ctx, q)
			must(t, err)
			got[i].affected, err = res.RowsAffected()
			must(t, err)
			_, err = res.LastInsertId()
			if err == nil {
				t.Error("LastInsertId succeeded")
			}
			_, err = db.ExecContext(ctx, "SELECT pg_advisory_unlock_all()")
			must(t, err)
		}
		if !slices.Equal(got[0].types, got[1].types) || got[0].affected != got[1].affected || len(got[0].rows) != len(got[1].rows) {
			t.Fatalf("%s: pgx %+v, pgadvlock %+v", q, got[0], got[1])
		}
		for i := range got[0].rows {
			if !slices.Equal(got[0].rows[i], got[1].rows[i]) {
				t.Errorf("%s: pgx %#v, pgadvlock %#v", q, got[0].rows[i], got[1].rows[i])
			}
		}
	}
}

// A connection offers what pgx's own offers.
func TestConnHasTheInterfacesOfPgx(t *testing.T) {
	b := setUp(t)
	conn := mustConn(t, b.db)
	defer conn.Close()
	must(t, conn.Raw(func(c any) error {
		if _, ok := c.(*pgadvlock.Conn); !ok {
			t.Errorf("Raw gives a %T", c)
		}
		_, prepares := c.(driver.ConnPrepareContext)
		_, begins := c.(driver.ConnBeginTx)
		_, checks := c.(driver.NamedValueChecker)
		_, pings := c.(driver.Pinger)
		_, resets := c.(driver.SessionResetter)
		if !prepares || !begins || !checks || !pings || !resets {
			t.Error("an interface is missing")
		}
		return nil
	}))
	var names []string
	must(t, conn.QueryRowContext(ctxFor(t), "SELECT array_agg(x)::text = '{a,b}' FROM unnest($1::text[]) x", []string{"a", "b"}).Scan(new(bool)))
	raw(t, conn, func(c *pgx.Conn) error {
		return c.QueryRow(ctxFor(t), "SELECT ARRAY['a', 'b']").Scan(&names)
	})
	if !slices.Equal(names, []string{"a", "b"}) {
		t.Errorf("names %q", names)
	}
}

func TestRegisteredConnConfigNamesPassThrough(t *testing.T) {
	server := pgtest.Shared(t)
	cfg, err := pgx.ParseConfig(server.DSN(server.NewDB(t)))
	must(t, err)
	cfg.RuntimeParams["application_name"] = "registered"
	name := stdlib.RegisterConnConfig(cfg)
	defer stdlib.UnregisterConnConfig(name)
	db, err := sql.Open("pgadvlock", name)
	must(t, err)
	defer db.Close()
	var app string
	must(t, db.QueryRowContext(ctxFor(t), "SHOW application_name").Scan(&app))
	if app != "registered" {
		t.Errorf("application_name %q", app)
	}
	if _, ok := pgadvlock.ConnectorOf(db); !ok {
		t.Error("ConnectorOf finds none")
	}
}

type closingConnector struct {
	driver.Connector
	closed bool
}

func (c *closingConnector) Close() error { c.closed = true; return errors.New("closed") }

func TestConnectorCloseIsForwarded(t *testing.T) {
	cfg, err := pgx.ParseConfig("host=localhost")
	must(t, err)
	base := &closingConnector{Connector: stdlib.GetConnector(*cfg)}
	c, err := pgadvlock.WrapConnector(base)
	must(t, err)
	if err := sql.OpenDB(c).Close(); err == nil || !base.closed {
		t.Errorf("closed %t, error %v", base.closed, err)
	}
}

func TestRegisterPanicsOnABadOption(t *testing.T) {
	defer func() {
		if p := recover(); p == nil {
			t.Error("no panic")
		}
	}()
	pgadvlock.Register("pgadvlock-bad", pgadvlock.WithResetTimeout(-1))
}
