package pgadvlock_test

// Waiting, losing, dying: what becomes of a lock whose wait ended in an error,
// and of one whose connection broke.

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgadvlock/pgadvlock"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

// tries is how often a race is run: 100 times, or PGADVLOCK_TEST_TRIES.
func tries() int {
	if n, err := strconv.Atoi(os.Getenv("PGADVLOCK_TEST_TRIES")); err == nil {
		return n
	}
	return 100
}

// A wait that ends while the lock is being granted: the caller has an error,
// the session may have the lock. It must not keep it, and nothing that the
// caller does hold may go.
func TestGrantedAfterError(t *testing.T) {
	t.Parallel()
	const bound = 5 * time.Millisecond
	type race struct {
		setUp string
		wait  func(t *testing.T, conn *sql.Conn) error
	}
	lock := func(ctx context.Context, conn *sql.Conn) error {
		_, err := conn.ExecContext(ctx, "SELECT pg_advisory_lock(42)")
		return err
	}
	for name, r := range map[string]race{
		"lock_timeout": {"SET lock_timeout = '5ms'", func(t *testing.T, conn *sql.Conn) error {
			return lock(ctxFor(t), conn)
		}},
		"statement_timeout": {"SET statement_timeout = '5ms'", func(t *testing.T, conn *sql.Conn) error {
			return lock(ctxFor(t), conn)
		}},
		"context": {"SELECT 1", func(t *testing.T, conn *sql.Conn) error {
			ctx, cancel := context.WithTimeout(ctxFor(t), bound)
			defer cancel()
			return lock(ctx, conn)
		}},
		"pg_cancel_backend": {"SELECT 1", func(t *testing.T, conn *sql.Conn) error {
			return lock(ctxFor(t), conn)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			server := pgtest.Shared(t)
			cfg, err := pgx.ParseConfig(server.DSN(server.NewDB(t)))
			must(t, err)
			var noticed atomic.Int64
			cfg.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { noticed.Add(1) }
			cfg.BuildContextWatcherHandler = func(c *pgconn.PgConn) ctxwatch.Handler {
				return &pgconn.CancelRequestContextWatcherHandler{Conn: c, CancelRequestDelay: 0, DeadlineDelay: 5 * time.Second}
			}
			dsn := stdlib.RegisterConnConfig(cfg)
			defer stdlib.UnregisterConnConfig(dsn)
			rec := &recorder{}
			db := openDB(t, dsn, rec)
			see, holder := pgtest.Observe(t, cfg.ConnString()), pgtest.Observe(t, cfg.ConnString())
			enter := func() (*sql.Conn, uint32) {
				conn := mustConn(t, db)
				// The caller's own: another key, and the same key in another space.
				mustExec(t, conn, "SELECT pg_advisory_lock(7), pg_advisory_lock(0, 42)")
				mustExec(t, conn, r.setUp)
				return conn, backendPID(t, conn)
			}
			conn, pid := enter()
			defer func() { conn.Close() }()

			failed, unsent := 0, 0
			for range tries() {
				holder.Lock(42)
				released := make(chan error, 1)
				sleep := bound + time.Duration(rand.Int64N(int64(2*time.Millisecond))) - time.Millisecond
				go func() { // server-side, for precision
					ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
					defer cancel()
					query := fmt.Sprintf("SELECT pg_advisory_unlock(42) FROM pg_sleep(%f)", sleep.Seconds())
					if name == "pg_cancel_backend" {
						query = fmt.Sprintf("SELECT pg_advisory_unlock(42), pg_cancel_backend(%d) FROM pg_sleep(%f)", pid, sleep.Seconds())
					}
					_, err := holder.Conn().Exec(ctx, query)
					released <- err
				}()
				err := r.wait(t, conn)
				must(t, <-released)
				if name == "context" && errors.Is(err, driver.ErrBadConn) {
					// It ended before anything was sent, on a busy machine: then
					// database/sql closes the connection, as it does with pgx.
					unsent++
					conn.Close()
					conn, pid = enter()
					continue
				}
				mine := 0
				for _, l := range see.Locks() {
					if l.PID == pid && l.Granted {
						mine++
						if l.ObjSubID == 1 && l.Key == 42 && err != nil {
							t.Fatalf("held after %v", err)
						}
					}
				}
				if want := 2; err == nil && mine != want+1 || err != nil && mine != want {
					t.Fatalf("after %v the session holds %d locks: %v; events %v", err, mine, see.Locks(), rec.of(pgadvlock.RuleLostLock))
				}
				if err == nil {
					unlockRetrying(t, conn)
				} else {
					failed++
				}
			}
			granted := len(rec.of(pgadvlock.RuleGrantedAfterError))
			t.Logf("%d tries, %d of them not sent, %d errors, %d of those with the lock granted", tries(), unsent, failed, granted)
			if n := len(rec.all()) - granted - unsent; n > 0 || noticed.Load() > 0 {
				t.Errorf("%d other events, %d notices: %v", n, noticed.Load(), rec.all())
			}
			c, _ := pgadvlock.ConnectorOf(db)
			if s := c.Sessions(); len(s) != 1 || !s[0].Exact || len(s[0].Held) != 2 {
				t.Errorf("sessions %+v", s)
			}
		})
	}
}

// unlockRetrying unlocks, though a late cancel may hit the unlock.
func unlockRetrying(t *testing.T, conn *sql.Conn) {
	t.Helper()
	for range 3 {
		if _, err := conn.ExecContext(ctxFor(t), "SELECT 1"); err != nil {
			continue
		}
		mustExec(t, conn, "SELECT pg_advisory_unlock(42)")
		return
	}
}

// lost takes key 42 on a connection and lets how break it.
func TestLostLock(t *testing.T) {
	assertLost := func(t *testing.T, rec *recorder) {
		t.Helper()
		e := rec.of(pgadvlock.RuleLostLock)
		if len(e) != 1 || len(e[0].Locks) != 1 || e[0].Locks[0].Key.String() != "42" || e[0].Locks[0].Count != 1 ||
			e[0].Locks[0].Caller.Line == 0 || e[0].Locks[0].Since.IsZero() || e[0].Err == nil {
			t.Errorf("events %+v", rec.all())
		}
	}
	locked := func(t *testing.T, db *sql.DB) *sql.Conn {
		t.Helper()
		conn := mustConn(t, db)
		mustExec(t, conn, "SELECT pg_advisory_lock(42)")
		return conn
	}
	t.Run("terminated, told at the next use", func(t *testing.T) {
		b := setUp(t)
		conn := locked(t, b.db)
		defer conn.Close()
		b.see.Exec("SELECT pg_terminate_backend($1, 5000)", backendPID(t, conn))
		var pg *pgconn.PgError
		if _, err := conn.ExecContext(ctxFor(t), "SELECT 1"); !errors.As(err, &pg) || pg.Code != "57P01" {
			t.Errorf("error %v", err)
		}
		assertLost(t, b.rec)
		// Never silently another connection under the caller.
		if _, err := conn.ExecContext(ctxFor(t), "SELECT 1"); err == nil {
			t.Error("the next statement succeeded")
		}
	})
	t.Run("terminated, told at the return", func(t *testing.T) {
		b := setUp(t)
		conn := locked(t, b.db)
		b.see.Exec("SELECT pg_terminate_backend($1, 5000)", backendPID(t, conn))
		must(t, conn.Close())
		assertLost(t, b.rec)
		if e := b.rec.all(); len(e) != 1 {
			t.Errorf("events %+v", e)
		}
	})
	t.Run("server stopped", func(t *testing.T) {
		server := pgtest.Private(t)
		b := setUpOn(t, server.DSN("postgres"))
		conn := locked(t, b.db)
		defer conn.Close()
		must(t, server.Stop("immediate"))
		if _, err := conn.ExecContext(ctxFor(t), "SELECT 1"); err == nil {
			t.Error("no error")
		}
		assertLost(t, b.rec)
	})
	t.Run("context ended", func(t *testing.T) {
		b := setUp(t)
		conn := locked(t, b.db)
		defer conn.Close()
		ctx, cancel := context.WithTimeout(ctxFor(t), 20*time.Millisecond)
		defer cancel()
		if _, err := conn.ExecContext(ctx, "SELECT pg_sleep(10)"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v", err)
		}
		assertLost(t, b.rec)
	})
	t.Run("context ended in a lock statement", func(t *testing.T) {
		b := setUp(t)
		conn := locked(t, b.db)
		defer conn.Close()
		b.see.Lock(43)
		ctx, cancel := context.WithTimeout(ctxFor(t), 20*time.Millisecond)
		defer cancel()
		if _, err := conn.ExecContext(ctx, "SELECT pg_advisory_lock(43)"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v", err)
		}
		assertLost(t, b.rec)
	})
	t.Run("panic in Raw, with reset off", func(t *testing.T) {
		b := setUp(t, pgadvlock.WithReset(pgadvlock.ResetOff))
		conn := locked(t, b.db)
		defer conn.Close()
		func() {
			defer func() { _ = recover() }()
			_ = conn.Raw(func(any) error { panic("no") })
		}()
		assertLost(t, b.rec)
	})
	t.Run("closed in Raw, which then panics", func(t *testing.T) {
		b := setUp(t)
		conn := locked(t, b.db)
		defer conn.Close()
		func() {
			defer func() { _ = recover() }()
			_ = conn.Raw(func(c any) error {
				_ = c.(*pgadvlock.Conn).Conn().Close(ctxFor(t))
				panic("no")
			})
		}()
		assertLost(t, b.rec)
	})
	t.Run("MaxLifetime with reset off", func(t *testing.T) {
		b := setUp(t, pgadvlock.WithReset(pgadvlock.ResetOff))
		b.db.SetConnMaxLifetime(50 * time.Millisecond)
		must(t, locked(t, b.db).Close())
		pgtest.Eventually(t, 3*time.Second, "the connection is closed", func() bool { return b.db.Stats().OpenConnections == 0 })
		assertLost(t, b.rec)
	})
	t.Run("closed with nothing held is no loss", func(t *testing.T) {
		b := setUp(t)
		conn := locked(t, b.db)
		mustExec(t, conn, "SELECT pg_advisory_unlock(42)")
		b.see.Exec("SELECT pg_terminate_backend($1, 5000)", backendPID(t, conn))
		_, _ = conn.ExecContext(ctxFor(t), "SELECT 1")
		must(t, conn.Close())
		if e := b.rec.all(); len(e) > 0 {
			t.Errorf("events %v", e)
		}
	})
}

// pgadvlock_max_wait ends a wait, and lock_timeout is afterwards what it was:
// in every exec mode, inside and outside transactions and savepoints, beside
// the program's own lock_timeout.
func TestMaxWait(t *testing.T) {
	t.Parallel()
	server := pgtest.Shared(t)
	show := func(t *testing.T, conn *sql.Conn) (v string) {
		t.Helper()
		must(t, conn.QueryRowContext(ctxFor(t), "SHOW lock_timeout").Scan(&v))
		return v
	}
	n := 0
	for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"} {
		for _, place := range []string{"autocommit", "transaction", "savepoint", "prepared"} {
			for _, own := range []string{"", "SET lock_timeout = '1min'", "SET lock_timeout = '20ms'"} {
				for _, local := range []bool{false, true} {
					if local && (own == "" || place == "autocommit" || place == "prepared") {
						continue
					}
					n++
					t.Run(strings.Join([]string{mode, place, own, fmt.Sprint(local)}, " "), func(t *testing.T) {
						t.Parallel()
						dsn := server.DSN(server.NewDB(t))
						see, rec := pgtest.Observe(t, dsn), &recorder{}
						db := openDB(t, dsn+"&default_query_exec_mode="+mode+"&pgadvlock_max_wait=60ms", rec)
						conn := mustConn(t, db)
						defer conn.Close()
						inTx := place == "transaction" || place == "savepoint"
						if own != "" && !local {
							mustExec(t, conn, own)
						}
						if inTx {
							mustExec(t, conn, "BEGIN")
						}
						if local {
							mustExec(t, conn, strings.Replace(own, "SET", "SET LOCAL", 1))
						}
						before := show(t, conn)
						lock := func(key int) error {
							if place != "prepared" {
								_, err := conn.ExecContext(ctxFor(t), "SELECT pg_advisory_lock($1)", key)
								return err
							}
							stmt, err := conn.PrepareContext(ctxFor(t), "SELECT pg_advisory_lock($1)")
							must(t, err)
							defer stmt.Close()
							_, err = stmt.ExecContext(ctxFor(t), key)
							return err
						}
						if place == "savepoint" {
							mustExec(t, conn, "SAVEPOINT a")
						}
						must(t, lock(41))
						if after := show(t, conn); after != before {
							t.Errorf("after the grant lock_timeout is %s, before it was %s", after, before)
						}
						see.Lock(42)
						start := time.Now()
						err := lock(42)
						waited := time.Since(start)
						if sqlState(err) != "55P03" || waited > 5*time.Second {
							t.Errorf("after %s: %v", waited, err)
						}
						if ours := own != "SET lock_timeout = '20ms'"; strings.Contains(err.Error(), "pgadvlock_max_wait=60ms") != ours {
							t.Errorf("error %v", err)
						}
						switch place {
						case "transaction":
							mustExec(t, conn, "ROLLBACK")
						case "savepoint":
							mustExec(t, conn, "ROLLBACK TO a")
						}
						want := before
						if local && place == "transaction" {
							want = "0" // the program's own SET LOCAL ended as well
						}
						if after := show(t, conn); after != want {
							t.Errorf("after the error lock_timeout is %s, want %s", after, want)
						}
						if !see.Held(41) {
							t.Error("the other lock is gone")
						}
						if place == "savepoint" {
							mustExec(t, conn, "COMMIT")
						}
						see.Unlock(42)
						mustExec(t, conn, "SELECT pg_advisory_unlock(41)")
						if l := see.Locks(); len(l) > 0 {
							t.Errorf("locks %v", l)
						}
					})
				}
			}
		}
	}
	if n < 40 {
		t.Errorf("%d combinations", n)
	}
}

// A try does not wait, and a statement that is not plain cannot be bounded:
// neither costs a round trip.
func TestMaxWaitCostsNothingElsewhere(t *testing.T) {
	server := pgtest.Shared(t)
	db, writes := openCounted(t, server.DSN(server.NewDB(t))+"&default_query_exec_mode=exec", &recorder{}, pgadvlock.WithMaxWait(time.Second))
	conn := mustConn(t, db)
	defer conn.Close()
	mustExec(t, conn, "SELECT pg_advisory_lock(1)")
	for _, c := range []struct {
		statement string
		want      int64
	}{
		{"SELECT 1", 1}, {"SELECT pg_try_advisory_lock(2)", 1}, {"SELECT pg_advisory_unlock(2)", 1},
		{"SELECT pg_advisory_lock(3)", 3}, {"SELECT pg_advisory_lock(4) FROM generate_series(1, 2)", 1},
	} {
		before := writes.Load()
		mustExec(t, conn, c.statement)
		if got := writes.Load() - before; got != c.want {
			t.Errorf("%s: %d round trips, want %d", c.statement, got, c.want)
		}
	}
}

// Two workers that take two keys in opposite orders deadlock now and then;
// they are reported at the first run, in which they do not.
func TestDeadlockIsFoundWithoutOne(t *testing.T) {
	b := setUp(t)
	worker := func(keys ...int) {
		conn := mustConn(t, b.db)
		defer conn.Close()
		for _, k := range keys {
			mustExec(t, conn, "SELECT pg_advisory_lock(hashtextextended($1, 0))", fmt.Sprint("account ", k))
		}
		mustExec(t, conn, "SELECT pg_advisory_unlock_all()")
	}
	worker(1, 2)
	if e := b.rec.all(); len(e) > 0 {
		t.Fatalf("events %v", e)
	}
	worker(2, 1)
	e := b.rec.all()
	if len(e) != 1 || e[0].Rule != pgadvlock.RuleLockOrder || len(e[0].Locks) != 4 {
		t.Fatalf("events %+v", e)
	}
	for _, l := range e[0].Locks {
		if l.Caller.Line == 0 || l.Key.String() != "hashtextextended($1, 0)" {
			t.Errorf("lock %+v", l)
		}
	}
	worker(2, 1) // once a pair
	if n := len(b.rec.all()); n != 1 {
		t.Errorf("%d events", n)
	}
}
