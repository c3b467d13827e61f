package pgadvlock_test

// pgadvlock_reset=discard_all: everything of the session is gone, and
// everything that was prepared keeps working.

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgadvlock/pgadvlock"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

var discardAll = pgadvlock.WithReset(pgadvlock.ResetDiscardAll)

func TestDiscardAllKeepsStatementsWorking(t *testing.T) {
	server := pgtest.Shared(t)
	for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"} {
		for name, dirty := range map[string]string{
			"exact":   "SELECT pg_advisory_lock(42)",
			"tainted": "DO $$ BEGIN PERFORM pg_advisory_lock(42); END $$",
		} {
			t.Run(mode+" "+name, func(t *testing.T) {
				b := setUpOn(t, server.DSN(server.NewDB(t))+"&default_query_exec_mode="+mode, discardAll)
				b.db.SetMaxOpenConns(1)
				ctx := ctxFor(t)
				prepared, err := b.db.PrepareContext(ctx, "SELECT $1::int + 1")
				must(t, err)
				lock, err := b.db.PrepareContext(ctx, "SELECT pg_try_advisory_lock($1)")
				must(t, err)
				var pid, pidAfter, n int
				must(t, b.db.QueryRowContext(ctx, "SELECT pg_backend_pid()").Scan(&pid))
				for range 3 {
					must(t, b.db.QueryRowContext(ctx, "SELECT $1::int * 2", 21).Scan(&n)) // cached by pgx
					must(t, prepared.QueryRowContext(ctx, 41).Scan(&n))
					var got bool
					must(t, lock.QueryRowContext(ctx, 43).Scan(&got))
					if n != 42 || !got {
						t.Errorf("n %d, got %t", n, got)
					}
					must(t, onOne(dirty)(t, b.db))
					if l := b.see.Locks(); len(l) > 0 {
						t.Fatalf("locks %v", l)
					}
				}
				must(t, b.db.QueryRowContext(ctx, "SELECT pg_backend_pid()").Scan(&pidAfter))
				if pid != pidAfter {
					t.Error("the connection was not kept")
				}
				must(t, prepared.Close())
				must(t, lock.Close())
			})
		}
	}
}

func TestDiscardAllResetsTheSession(t *testing.T) {
	hooked := 0
	b := setUp(t, discardAll, pgadvlock.WithAfterConnect(func(ctx context.Context, c *pgx.Conn) error {
		hooked++
		_, err := c.Exec(ctx, "SET work_mem = '7MB'")
		return err
	}))
	b.db.SetMaxOpenConns(1)
	must(t, onOne("SELECT pg_advisory_lock(42)", "CREATE TEMP TABLE scratch (i int)", "SET statement_timeout = '5s'", "SET work_mem = '9MB'",
		"LISTEN c", "PREPARE p AS SELECT pg_advisory_lock(43)")(t, b.db))
	conn := mustConn(t, b.db)
	defer conn.Close()
	var timeout, workMem string
	var tables, channels, statements int
	must(t, conn.QueryRowContext(ctxFor(t), `SELECT current_setting('statement_timeout'), current_setting('work_mem'),
		(SELECT count(*) FROM pg_class WHERE relname = 'scratch'), (SELECT count(*) FROM pg_listening_channels()),
		(SELECT count(*) FROM pg_prepared_statements WHERE name = 'p')`).Scan(&timeout, &workMem, &tables, &channels, &statements))
	if timeout != "0" || workMem != "7MB" || tables+channels+statements != 0 || hooked != 2 {
		t.Errorf("statement_timeout %s, work_mem %s, %d tables, %d channels, %d statements, hook run %d times", timeout, workMem, tables, channels, statements, hooked)
	}
}

func TestRoundTripsOfDiscardAll(t *testing.T) {
	server := pgtest.Shared(t)
	for _, c := range []struct {
		name       string
		opts       []pgadvlock.Option
		statements []string
		want       int64
	}{
		{"clean", nil, []string{"SELECT 1"}, 0},
		{"exact", nil, []string{"SELECT pg_advisory_lock(1)"}, 3}, // DISCARD ALL, DEALLOCATE ALL, pgadvlock_dead_peer
		{"exact, with a hook", []pgadvlock.Option{pgadvlock.WithAfterConnect(func(context.Context, *pgx.Conn) error { return nil })}, []string{"SELECT pg_advisory_lock(1)"}, 5}, // the report, since the hook had the connection, and a release of what it locked
		{"tainted", nil, []string{"DO $$ BEGIN PERFORM pg_advisory_lock(1); END $$"}, 4},                                                                                         // the report as well
		{"always", []pgadvlock.Option{pgadvlock.WithResetWhen(pgadvlock.ResetAlways)}, []string{"SELECT pg_advisory_lock(1)"}, 3},                                                // asked before
		{"always, nothing locked", []pgadvlock.Option{pgadvlock.WithResetWhen(pgadvlock.ResetAlways)}, []string{"SELECT 1"}, 5},                                                  // the question whether it is direct, and the report
		{"always, pool mode given", []pgadvlock.Option{pgadvlock.WithResetWhen(pgadvlock.ResetAlways), pgadvlock.WithPoolMode(pgadvlock.PoolSession)}, []string{"SELECT 1"}, 3},  // with the report
		{"transaction left open", nil, []string{"BEGIN", "SELECT pg_advisory_lock(1)"}, 3},                                                                                       // ROLLBACK, release, Terminate
		{"transaction pooling", []pgadvlock.Option{pgadvlock.WithPoolMode(pgadvlock.PoolTransaction), pgadvlock.WithResetWhen(pgadvlock.ResetAlways)}, []string{"SELECT 1"}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			db, writes := openCounted(t, server.DSN(server.NewDB(t)), &recorder{}, append(c.opts, discardAll)...)
			conn := mustConn(t, db)
			for _, s := range c.statements {
				mustExec(t, conn, s)
			}
			before := writes.Load()
			must(t, conn.Close())
			if got := writes.Load() - before; got != c.want {
				t.Errorf("%d round trips, want %d", got, c.want)
			}
		})
	}
}

// In a transaction DISCARD ALL is refused (25001), in a failed one everything
// is. The connection is not kept, as on pgx, so releasing is enough.
func TestDiscardAllAfterATransaction(t *testing.T) {
	for name, statements := range map[string][]string{
		"open": {"BEGIN", "SELECT pg_advisory_lock(42), pg_advisory_xact_lock(43)"}, "failed": {"BEGIN", "SELECT pg_advisory_lock(42), pg_advisory_xact_lock(43)", "SELECT 1/0"},
		"open, tainted": {"BEGIN", "DO $$ BEGIN PERFORM pg_advisory_lock(42); END $$"}, "failed, tainted": {"BEGIN", "DO $$ BEGIN PERFORM pg_advisory_lock(42); END $$", "SELECT 1/0"},
	} {
		t.Run(name, func(t *testing.T) {
			b := setUp(t, discardAll)
			conn := mustConn(t, b.db)
			pid := backendPID(t, conn)
			for _, s := range statements {
				if _, err := conn.ExecContext(ctxFor(t), s); (err != nil) != (s == "SELECT 1/0") {
					t.Fatalf("%s: %v", s, err)
				}
			}
			must(t, conn.Close())
			if l := b.see.Locks(); len(l) > 0 {
				t.Errorf("locks %v", l)
			}
			if e := b.rec.all(); len(e) != 1 || e[0].Rule != pgadvlock.RuleLeakedSessionLock || e[0].Err != nil {
				t.Errorf("events %+v", e)
			}
			if conn = mustConn(t, b.db); backendPID(t, conn) == pid {
				t.Error("the connection was kept")
			}
			must(t, conn.Close())
		})
	}
}

func TestFailingConnectHook(t *testing.T) {
	broken := errors.New("the hook's own error")
	fail := false
	b := setUp(t, discardAll, pgadvlock.WithAfterConnect(func(context.Context, *pgx.Conn) error {
		if fail {
			return broken
		}
		return nil
	}))
	conn := mustConn(t, b.db)
	mustExec(t, conn, "SELECT pg_advisory_lock(42)")
	fail = true
	must(t, conn.Close())
	b.see.WaitFor(time.Second, "nothing is held", func(l []pgtest.Lock) bool { return len(l) == 0 })
	if e := b.rec.all(); len(e) != 1 || !errors.Is(e[0].Err, broken) || b.db.Stats().OpenConnections != 0 {
		t.Errorf("events %+v, stats %+v", e, b.db.Stats())
	}
	if _, err := b.db.Conn(ctxFor(t)); !errors.Is(err, broken) {
		t.Errorf("connecting: %v", err)
	}
	fail = false
	must(t, b.db.PingContext(ctxFor(t)))
}

// discard_all goes through a pooler in session mode as well.
func TestDiscardAllThroughSessionPooling(t *testing.T) {
	b := behind(t, "session", discardAll)
	must(t, onOne("SELECT pg_advisory_lock(42)", "SET work_mem = '9MB'")(t, b.db))
	var workMem string
	must(t, b.db.QueryRowContext(ctxFor(t), "SHOW work_mem").Scan(&workMem))
	if len(b.see.Locks()) > 0 || workMem == "9MB" || b.db.Stats().Idle != 1 {
		t.Errorf("locks %v, work_mem %s, stats %+v", b.see.Locks(), workMem, b.db.Stats())
	}
}
