package pgadvlock_test

// The return to the pool: what it costs when there is nothing to do, and what
// it does when things go wrong.

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgadvlock/pgadvlock"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

// countingConn counts the writes, which are round trips, on a connection.
type countingConn struct {
	net.Conn
	writes *atomic.Int64
}

func (c countingConn) Write(p []byte) (int, error) {
	c.writes.Add(1)
	return c.Conn.Write(p)
}

// openCounted is openDB with a count of what is sent to the server.
func openCounted(t *testing.T, dsn string, rec *recorder, opts ...pgadvlock.Option) (*sql.DB, *atomic.Int64) {
	t.Helper()
	cfg, err := pgx.ParseConfig(dsn)
	must(t, err)
	writes := new(atomic.Int64)
	dial := cfg.DialFunc
	cfg.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return countingConn{c, writes}, nil
	}
	name := stdlib.RegisterConnConfig(cfg)
	t.Cleanup(func() { stdlib.UnregisterConnConfig(name) })
	return openDB(t, name, rec, opts...), writes
}

func TestRoundTripsOfTheReturn(t *testing.T) {
	for _, c := range []struct {
		name       string
		opts       []pgadvlock.Option
		statements []string
		raw        bool
		want       int64
	}{
		{name: "clean", statements: []string{"SELECT 1"}, want: 0},
		{name: "clean again", statements: []string{"SELECT pg_advisory_lock(1)", "SELECT pg_advisory_unlock(1)"}, want: 0},
		{name: "transaction locks", statements: []string{"BEGIN", "SELECT pg_advisory_xact_lock(1)", "COMMIT"}, want: 0},
		{name: "mentioned only", statements: []string{"SELECT 'pg_advisory_lock(1)'"}, want: 0},
		{name: "exact", statements: []string{"SELECT pg_advisory_lock(1)"}, want: 1},
		{name: "tainted", statements: []string{"DO $$ BEGIN PERFORM pg_advisory_lock(1); END $$"}, want: 1},
		{name: "lent out, never asked", raw: true, want: 2},
		{name: "lent out, asked before", statements: []string{"SELECT pg_advisory_lock(1)", "SELECT pg_advisory_unlock(1)"}, raw: true, want: 1},
		{name: "always, never asked", opts: []pgadvlock.Option{pgadvlock.WithResetWhen(pgadvlock.ResetAlways)}, statements: []string{"SELECT 1"}, want: 2},
		{name: "always, pool mode given", opts: []pgadvlock.Option{pgadvlock.WithResetWhen(pgadvlock.ResetAlways), pgadvlock.WithPoolMode(pgadvlock.PoolSession)}, statements: []string{"SELECT 1"}, want: 1},
		{name: "off", opts: []pgadvlock.Option{pgadvlock.WithReset(pgadvlock.ResetOff)}, statements: []string{"SELECT pg_advisory_lock(1)"}, want: 0},
		{name: "observe", opts: []pgadvlock.Option{pgadvlock.WithPreset(pgadvlock.PresetObserve)}, statements: []string{"SELECT pg_advisory_lock(1)"}, want: 0},
		{name: "transaction left open", statements: []string{"BEGIN", "SELECT pg_advisory_lock(1)"}, want: 3},                                             // ROLLBACK, release, Terminate
		{name: "close", opts: []pgadvlock.Option{pgadvlock.WithReset(pgadvlock.ResetClose)}, statements: []string{"SELECT pg_advisory_lock(1)"}, want: 2}, // release, Terminate
		{name: "transaction lock left open", statements: []string{"BEGIN", "SELECT pg_advisory_xact_lock(1)"}, want: 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			server := pgtest.Shared(t)
			db, writes := openCounted(t, server.DSN(server.NewDB(t)), &recorder{}, c.opts...)
			conn := mustConn(t, db)
			for _, s := range c.statements {
				mustExec(t, conn, s)
			}
			if c.raw {
				raw(t, conn, func(*pgx.Conn) error { return nil })
			}
			before := writes.Load()
			must(t, conn.Close())
			if got := writes.Load() - before; got != c.want {
				t.Errorf("%d round trips, want %d", got, c.want)
			}
		})
	}
}

// The first session lock of a connection costs one round trip more, to learn
// whether a pooler stands in between; nothing else does.
func TestRoundTripsOfLocks(t *testing.T) {
	server := pgtest.Shared(t)
	db, writes := openCounted(t, server.DSN(server.NewDB(t))+"&default_query_exec_mode=exec", &recorder{})
	conn := mustConn(t, db)
	defer conn.Close()
	for _, c := range []struct {
		statement string
		want      int64
	}{
		{"SELECT pg_advisory_xact_lock(1)", 1},
		{"SELECT pg_advisory_lock(1)", 2},
		{"SELECT pg_advisory_lock(2)", 1},
		{"SELECT pg_advisory_unlock(1)", 1},
		{"SELECT pg_try_advisory_lock(3)", 1},
	} {
		before := writes.Load()
		mustExec(t, conn, c.statement)
		if got := writes.Load() - before; got != c.want {
			t.Errorf("%s: %d round trips, want %d", c.statement, got, c.want)
		}
	}
}

func TestResetOffAndObserveLeaveTheLock(t *testing.T) {
	for name, opt := range map[string]pgadvlock.Option{
		"off":     pgadvlock.WithReset(pgadvlock.ResetOff),
		"observe": pgadvlock.WithPreset(pgadvlock.PresetObserve),
	} {
		for _, statement := range []string{"SELECT pg_advisory_lock(42)", "DO $$ BEGIN PERFORM pg_advisory_lock(42); END $$"} {
			t.Run(name+" "+statement, func(t *testing.T) {
				b := setUp(t, opt, unjudged[0])
				onConn(statement)(t, b.db)
				if !b.see.Held(42) {
					t.Error("the lock is gone")
				}
				if n := len(b.rec.of(pgadvlock.RuleLeakedSessionLock)); n != 1 {
					t.Errorf("reported %d times", n)
				}
				if b.db.Stats().Idle != 1 {
					t.Error("the connection was not kept")
				}
				for range 3 { // with the same lock: nothing new to tell
					onConn("SELECT 1")(t, b.db)
				}
				if n := len(b.rec.of(pgadvlock.RuleLeakedSessionLock)); n != 1 {
					t.Errorf("reported %d times", n)
				}
				// As on plain pgx, the next user of the connection can unlock.
				var unlocked bool
				must(t, b.db.QueryRowContext(ctxFor(t), "SELECT pg_advisory_unlock(42)").Scan(&unlocked))
				if !unlocked || b.see.Held(42) {
					t.Errorf("unlocked %t, held %t", unlocked, b.see.Held(42))
				}
			})
		}
	}
}

func TestPresetCanBeChangedWhileRunning(t *testing.T) {
	b := setUp(t, pgadvlock.WithPreset(pgadvlock.PresetObserve))
	onConn("SELECT pg_advisory_lock(42)")(t, b.db)
	if !b.see.Held(42) {
		t.Fatal("observe released the lock")
	}
	c, _ := pgadvlock.ConnectorOf(b.db)
	c.SetPreset(pgadvlock.PresetEnforce)
	onConn("SELECT 1")(t, b.db)
	if b.see.Held(42) {
		t.Error("enforce did not release the lock")
	}
	c.SetRule(pgadvlock.RuleLeakedSessionLock, pgadvlock.LevelOff)
	n := len(b.rec.all())
	onConn("SELECT pg_advisory_lock(42)")(t, b.db)
	if got := len(b.rec.all()); got != n {
		t.Errorf("%d events after the rule was switched off", got-n)
	}
}

func TestResetClose(t *testing.T) {
	b := setUp(t, pgadvlock.WithReset(pgadvlock.ResetClose))
	onConn("SELECT pg_advisory_lock(42)")(t, b.db)
	if l := b.see.Locks(); len(l) > 0 {
		t.Errorf("locks %v", l)
	}
	if s := b.db.Stats(); s.Idle != 0 || len(b.rec.of(pgadvlock.RuleLeakedSessionLock)) != 1 {
		t.Errorf("stats %+v, events %v", s, b.rec.all())
	}
}

// hiding is a middleware that does not forward driver.Validator.
type hiding struct{ driver.Connector }

type hidingConn struct {
	driver.Conn
	driver.QueryerContext
	driver.ExecerContext
	driver.SessionResetter
}

func (h hiding) Connect(ctx context.Context) (driver.Conn, error) {
	c, err := h.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return hidingConn{c, c.(driver.QueryerContext), c.(driver.ExecerContext), c.(driver.SessionResetter)}, nil
}

func TestHiddenReturnHook(t *testing.T) {
	server := pgtest.Shared(t)
	dsn := server.DSN(server.NewDB(t))
	see, rec := pgtest.Observe(t, dsn), &recorder{}
	c, err := pgadvlock.NewConnector(dsn, pgadvlock.WithEventHandler(rec.handle), pgadvlock.WithLogger(quiet()))
	must(t, err)
	db := sql.OpenDB(hiding{c})
	defer db.Close()
	onConn("SELECT pg_advisory_lock(42)")(t, db)
	if !see.Held(42) {
		t.Fatal("the middleware does not hide the hook: the test shows nothing")
	}
	conn := mustConn(t, db)
	defer conn.Close()
	if see.Held(42) {
		t.Error("the next user of the connection inherits the lock")
	}
	if e := rec.of(pgadvlock.RuleReturnHookHidden); len(e) != 1 || len(e[0].Locks) != 1 {
		t.Errorf("events: %+v", rec.all())
	}
}

// Behind transaction pooling a release would reach somebody else's backend.
func TestNothingIsSentBehindTransactionPooling(t *testing.T) {
	server := pgtest.Shared(t)
	dsn := server.DSN(server.NewDB(t))
	for _, opts := range [][]pgadvlock.Option{
		{pgadvlock.WithPoolMode(pgadvlock.PoolTransaction)},
		{pgadvlock.WithPoolMode(pgadvlock.PoolStatement), pgadvlock.WithResetWhen(pgadvlock.ResetAlways)},
	} {
		db, writes := openCounted(t, dsn, &recorder{}, opts...)
		conn := mustConn(t, db)
		raw(t, conn, func(*pgx.Conn) error { return nil })
		before := writes.Load()
		must(t, conn.Close())
		if got := writes.Load() - before; got != 0 {
			t.Errorf("%d round trips", got)
		}
	}
}

func TestFaultsAtReturn(t *testing.T) {
	const bound = 2 * time.Second // WithResetTimeout below is 1 s
	closeWithin := func(t *testing.T, conn *sql.Conn) {
		t.Helper()
		start := time.Now()
		must(t, conn.Close())
		if d := time.Since(start); d > bound {
			t.Errorf("Close took %s", d)
		}
	}
	locked := func(t *testing.T, db *sql.DB) (*sql.Conn, uint32) {
		t.Helper()
		conn := mustConn(t, db)
		mustExec(t, conn, "SELECT pg_advisory_lock(42)")
		return conn, backendPID(t, conn)
	}
	timeout := pgadvlock.WithResetTimeout(time.Second)

	t.Run("backend frozen", func(t *testing.T) {
		b := setUp(t, timeout)
		conn, pid := locked(t, b.db)
		thaw := pgtest.Freeze(t, int(pid))
		closeWithin(t, conn)
		mustExec(t, b.db, "SELECT 1") // on another connection
		thaw()
		b.see.WaitFor(time.Second, "nothing is held", func(l []pgtest.Lock) bool { return len(l) == 0 })
		if e := b.rec.of(pgadvlock.RuleLeakedSessionLock); len(e) != 1 || e[0].Err == nil {
			t.Errorf("events %+v", e)
		}
	})
	t.Run("backend terminated", func(t *testing.T) {
		b := setUp(t, timeout)
		conn, pid := locked(t, b.db)
		b.see.Exec("SELECT pg_terminate_backend($1, 5000)", pid)
		closeWithin(t, conn)
		if l := b.see.Locks(); len(l) > 0 {
			t.Errorf("locks %v", l)
		}
		mustExec(t, b.db, "SELECT 1")
	})
	t.Run("server stopped", func(t *testing.T) {
		server := pgtest.Private(t)
		b := setUpOn(t, server.DSN("postgres"), timeout)
		conn, _ := locked(t, b.db)
		must(t, server.Stop("immediate"))
		closeWithin(t, conn)
		must(t, server.Restart())
		mustExec(t, b.db, "SELECT 1")
		if l := pgtest.Observe(t, b.dsn).Locks(); len(l) > 0 {
			t.Errorf("locks %v", l)
		}
	})
	t.Run("impostor in search_path", func(t *testing.T) {
		b := setUp(t, timeout)
		b.see.Exec(`CREATE SCHEMA evil;
			CREATE FUNCTION evil.pg_advisory_unlock_all() RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE 'impostor'; END $$;
			CREATE FUNCTION evil.pg_backend_pid() RETURNS int LANGUAGE sql AS 'SELECT 1';
			CREATE FUNCTION evil.never(text, text) RETURNS boolean LANGUAGE sql AS 'SELECT false';
			CREATE FUNCTION evil.never(int, int) RETURNS boolean LANGUAGE sql AS 'SELECT false';
			CREATE OPERATOR evil.= (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.never);
			CREATE OPERATOR evil.= (LEFTARG = int, RIGHTARG = int, FUNCTION = evil.never);
			CREATE VIEW evil.pg_locks AS SELECT 'advisory' AS locktype`)
		conn := mustConn(t, b.db)
		mustExec(t, conn, "SET search_path = evil, pg_catalog")
		mustExec(t, conn, "SELECT pg_advisory_lock(42)")
		mustExec(t, conn, "DO $$ BEGIN PERFORM pg_advisory_lock(43); END $$")
		closeWithin(t, conn)
		if l := b.see.Locks(); len(l) > 0 {
			t.Errorf("locks %v", l)
		}
		if e := b.rec.of(pgadvlock.RuleLeakedSessionLock); len(e) != 1 || len(e[0].Locks) != 2 || e[0].Err != nil {
			t.Errorf("events %+v", e)
		}
	})
	t.Run("pg_locks may not be read", func(t *testing.T) {
		server := pgtest.Private(t)
		see := pgtest.Observe(t, server.DSN("postgres"))
		see.Exec("CREATE ROLE poor LOGIN; REVOKE SELECT ON pg_locks FROM PUBLIC")
		rec := &recorder{}
		db := openDB(t, strings.Replace(server.DSN("postgres"), "://postgres@", "://poor@", 1), rec, timeout)
		onConn("DO $$ BEGIN PERFORM pg_advisory_lock(43); END $$")(t, db)
		if l := see.Locks(); len(l) > 0 || db.Stats().Idle != 1 {
			t.Errorf("locks %v, stats %+v", l, db.Stats())
		}
	})
	t.Run("panic in the inner Validator", func(t *testing.T) {
		server := pgtest.Shared(t)
		cfg, err := pgx.ParseConfig(server.DSN(server.NewDB(t)))
		must(t, err)
		c, err := pgadvlock.WrapConnector(panicking{stdlib.GetConnector(*cfg)}, pgadvlock.WithLogger(quiet()))
		must(t, err)
		db := sql.OpenDB(c)
		defer db.Close()
		db.SetMaxOpenConns(1)
		for range 3 { // a lost slot would block the second
			onConn("SELECT pg_advisory_lock(42)")(t, db)
		}
		if s := db.Stats(); s.OpenConnections != 0 {
			t.Errorf("stats %+v", s)
		}
	})
}

// panicking is a driver whose Validator panics.
type panicking struct{ driver.Connector }

type panickingConn struct{ *stdlib.Conn }

func (p panicking) Connect(ctx context.Context) (driver.Conn, error) {
	c, err := p.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return panickingConn{c.(*stdlib.Conn)}, nil
}

func (panickingConn) IsValid() bool { panic("no") }

// One of the errors that the ledger must not take for proof that nothing was
// locked: the wait is cancelled, the lock may have been granted all the same.
func TestNothingLeaksAfterATimedOutLock(t *testing.T) {
	b := setUp(t)
	b.see.Lock(42)
	conn := mustConn(t, b.db)
	mustExec(t, conn, "SET lock_timeout = '20ms'")
	_, err := conn.ExecContext(ctxFor(t), "SELECT pg_advisory_lock(42)")
	var pg interface{ SQLState() string }
	if !errors.As(err, &pg) || pg.SQLState() != "55P03" {
		t.Fatalf("error %v", err)
	}
	must(t, conn.Close())
	b.see.Unlock(42)
	if l := b.see.Locks(); len(l) > 0 {
		t.Errorf("locks %v", l)
	}
}
