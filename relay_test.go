package pgadvlock_test

// A network that breaks while a lock is held: the connection is reset by a relay
// between the driver and PostgreSQL.

import (
	"context"
	"database/sql"
	"io"
	"net"
	"net/url"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgadvlock/pgadvlock"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

// relay passes bytes between clients and a server until it is told to reset
// them.
type relay struct {
	dsn string // with the relay's address

	mute    atomic.Bool  // new clients are never answered
	unheard atomic.Int64 // how many of those there are

	mu      sync.Mutex // guards clients
	clients []*net.TCPConn
}

func newRelay(t *testing.T, dsn string) *relay {
	t.Helper()
	u, err := url.Parse(dsn)
	must(t, err)
	server := u.Host
	if server == "" {
		t.Skipf("%q is not a URL with a host to stand in front of", dsn)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	u.Host = l.Addr().String()
	r := &relay{dsn: u.String()}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			if r.mute.Load() {
				r.unheard.Add(1)
				wg.Go(func() {
					defer r.unheard.Add(-1)
					_, _ = io.Copy(io.Discard, client) // until the client gives up
					client.Close()
				})
				continue
			}
			far, err := net.Dial("tcp", server)
			if err != nil {
				client.Close()
				continue
			}
			r.mu.Lock()
			r.clients = append(r.clients, client.(*net.TCPConn))
			r.mu.Unlock()
			for _, way := range [][2]net.Conn{{client, far}, {far, client}} {
				wg.Go(func() {
					_, _ = io.Copy(way[0], way[1])
					way[0].Close()
					way[1].Close()
				})
			}
		}
	})
	t.Cleanup(func() {
		l.Close()
		r.reset()
		wg.Wait()
	})
	return r
}

// reset answers all clients with RST, as a firewall does that has forgotten a
// connection, and leaves the server, which sees the end of it.
func (r *relay) reset() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.clients {
		_ = c.SetLinger(0)
		_ = c.Close()
	}
	r.clients = nil
}

// said is an error as it compares between two connections.
func said(err error) string {
	if err == nil {
		return "no error"
	}
	return regexp.MustCompile(`127\.0\.0\.1:\d+`).ReplaceAllString(err.Error(), "address")
}

// A connection that is reset while it holds a lock: the caller is told what pgx
// tells, never gets another connection in its place, and the loss is reported
// once, with what was held, since when and from where.
func TestLostLockAfterAReset(t *testing.T) {
	t.Parallel()
	onExec := func(query string) func(context.Context, *sql.Conn) error {
		return func(ctx context.Context, c *sql.Conn) error {
			_, err := c.ExecContext(ctx, query)
			return err
		}
	}
	onQuery := func(query string) func(context.Context, *sql.Conn) error {
		return func(ctx context.Context, c *sql.Conn) error {
			rows, err := c.QueryContext(ctx, query)
			if err != nil {
				return err
			}
			defer rows.Close()
			for rows.Next() {
			}
			return rows.Err()
		}
	}
	for _, use := range []struct {
		name   string
		do     func(context.Context, *sql.Conn) error
		during bool                // the reset comes while the server works on it
		end    func(*sql.Tx) error // instead of do
	}{
		{name: "exec", do: onExec("SELECT 1")},
		{name: "query", do: onQuery("SELECT 1")},
		{name: "lock", do: onExec("SELECT pg_advisory_lock(43)")},
		{name: "same lock again", do: onExec("SELECT pg_advisory_lock(42)")},
		{name: "unlock", do: onQuery("SELECT pg_advisory_unlock(42)")},
		{name: "opaque lock", do: onExec("DO $$ BEGIN PERFORM pg_advisory_lock(43); END $$")},
		{name: "begin", do: func(ctx context.Context, c *sql.Conn) error {
			_, err := c.BeginTx(ctx, nil)
			return err
		}},
		{name: "prepare", do: func(ctx context.Context, c *sql.Conn) error {
			_, err := c.PrepareContext(ctx, "SELECT 1")
			return err
		}},
		{name: "ping", do: func(ctx context.Context, c *sql.Conn) error { return c.PingContext(ctx) }},
		{name: "commit", end: (*sql.Tx).Commit},
		{name: "rollback", end: (*sql.Tx).Rollback},
		{name: "exec in a transaction", end: func(tx *sql.Tx) error {
			defer func() { _ = tx.Rollback() }()
			_, err := tx.Exec("SELECT pg_advisory_xact_lock(43)")
			return err
		}},
		{name: "during exec", do: onExec("SELECT pg_sleep(30)"), during: true},
		{name: "during query", do: onQuery("SELECT pg_sleep(30)"), during: true},
		{name: "during lock", do: onExec("SELECT pg_advisory_lock(44)"), during: true},
	} {
		t.Run(use.name, func(t *testing.T) {
			t.Parallel()
			server := pgtest.Shared(t)
			dsn := server.DSN(server.NewDB(t))
			see := pgtest.Observe(t, dsn)
			see.Lock(44)
			// lose is the program, and what it is told.
			lose := func(db *sql.DB, r *relay, used func()) (told []string) {
				conn := mustConn(t, db)
				mustExec(t, conn, "SELECT pg_advisory_lock(42)")
				pid := backendPID(t, conn)
				switch {
				case use.end != nil:
					tx, err := conn.BeginTx(ctxFor(t), nil)
					must(t, err)
					r.reset()
					told = append(told, said(use.end(tx)))
				case use.during:
					errs := make(chan error, 1)
					go func() { errs <- use.do(ctxFor(t), conn) }()
					pgtest.Eventually(t, 10*time.Second, "the server works on it", func() (working bool) {
						must(t, see.Conn().QueryRow(ctxFor(t), "SELECT state = 'active' AND wait_event IS NOT NULL FROM pg_stat_activity WHERE pid = $1", pid).Scan(&working))
						return working
					})
					r.reset()
					told = append(told, said(<-errs))
				default:
					r.reset()
					told = append(told, said(use.do(ctxFor(t), conn)))
				}
				used()
				var other uint32
				err := conn.QueryRowContext(ctxFor(t), "SELECT pg_backend_pid()").Scan(&other)
				if err == nil {
					t.Errorf("the caller of backend %d was given %d", pid, other)
				}
				told = append(told, said(err), said(conn.Close()))
				_, err = db.ExecContext(ctxFor(t), "SELECT 1")
				return append(told, "then: "+said(err))
			}
			gone := func() {
				see.Exec("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND query = 'SELECT pg_sleep(30)'")
				see.Unlock(44)
				see.WaitFor(10*time.Second, "nothing is held", func(l []pgtest.Lock) bool { return len(l) == 0 })
				see.Lock(44)
			}

			r := newRelay(t, dsn)
			plain, err := sql.Open("pgx", r.dsn)
			must(t, err)
			defer plain.Close()
			want := lose(plain, r, func() {})
			plain.Close()
			gone()

			rec := &recorder{}
			before := time.Now()
			got := lose(openDB(t, r.dsn, rec), r, func() {
				if len(rec.all()) != 1 {
					t.Errorf("at the next use %d events", len(rec.all()))
				}
			})
			for i := range want {
				if got[i] != want[i] {
					t.Errorf("step %d: %q, on pgx %q", i, got[i], want[i])
				}
			}
			e := rec.all()
			if len(e) != 1 || e[0].Rule != pgadvlock.RuleLostLock || len(e[0].Locks) != 1 || e[0].Err == nil {
				t.Fatalf("events %+v", e)
			}
			if l := e[0].Locks[0]; l.Key.String() != "42" || l.Count != 1 || l.Mode != pgadvlock.ExclusiveLock || l.Scope != pgadvlock.ScopeSession ||
				l.Since.Before(before) || l.Since.After(e[0].Time) || l.Caller.Line == 0 || e[0].Caller != l.Caller {
				t.Errorf("event %+v", e[0])
			}
			gone()
		})
	}
}

// Nobody uses the connection after the reset: the return meets it.
func TestLostLockAfterAResetWhileIdle(t *testing.T) {
	t.Parallel()
	for name, begin := range map[string]bool{"outside a transaction": false, "in a transaction": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := pgtest.Shared(t)
			dsn := server.DSN(server.NewDB(t))
			see, r, rec := pgtest.Observe(t, dsn), newRelay(t, dsn), &recorder{}
			db := openDB(t, r.dsn, rec)
			conn := mustConn(t, db)
			if begin {
				mustExec(t, conn, "BEGIN")
			}
			_, file, line, _ := runtime.Caller(0)
			_, err := conn.ExecContext(ctxFor(t), "SELECT pg_advisory_lock(42)") // line+1
			must(t, err)
			r.reset()
			see.WaitFor(10*time.Second, "nothing is held", func(l []pgtest.Lock) bool { return len(l) == 0 })
			must(t, conn.Close())
			e := rec.all()
			if len(e) != 1 || e[0].Rule != pgadvlock.RuleLostLock || len(e[0].Locks) != 1 || e[0].Err == nil {
				t.Fatalf("events %+v", e)
			}
			if l := e[0].Locks[0]; l.Key.String() != "42" || l.Count != 1 || l.Since.IsZero() || l.Caller.File != file || l.Caller.Line != line+1 {
				t.Errorf("event %+v", e[0])
			}
			if s := db.Stats(); s.OpenConnections != 0 {
				t.Errorf("the connection was kept: %+v", s)
			}
			mustExec(t, db, "SELECT 1")
		})
	}
}

// The question who holds a lock gets no answer: the wait is reported without
// one, ends when the lock is free, and leaves nothing behind.
func TestLookupThatGetsNoAnswer(t *testing.T) {
	t.Parallel()
	for name, patience := range map[string]time.Duration{"given up": 50 * time.Millisecond, "under way when the lock is free": time.Minute} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := pgtest.Shared(t)
			dsn := server.DSN(server.NewDB(t))
			see, r, rec := pgtest.Observe(t, dsn), newRelay(t, dsn), &recorder{}
			db := openDB(t, r.dsn, rec, pgadvlock.WithWaitWarning(20*time.Millisecond), pgadvlock.WithResetTimeout(patience))
			conn := mustConn(t, db)
			defer conn.Close()
			mustExec(t, conn, "SELECT pg_advisory_lock(1)") // what is asked before the first lock has been
			r.mute.Store(true)
			see.Lock(42)
			done := make(chan error, 1)
			go func() {
				_, err := conn.ExecContext(context.Background(), "SELECT pg_advisory_lock(42)")
				done <- err
			}()
			if patience < time.Minute {
				pgtest.Eventually(t, 10*time.Second, "it is reported", func() bool { return len(rec.of(pgadvlock.RuleLongWait)) == 1 })
				if e := rec.of(pgadvlock.RuleLongWait)[0]; e.Err == nil || !strings.Contains(e.Err.Error(), "could not be found out") {
					t.Errorf("event %+v", e)
				}
			} else {
				pgtest.Eventually(t, 10*time.Second, "the question", func() bool { return r.unheard.Load() == 1 })
			}
			see.Unlock(42)
			select {
			case err := <-done:
				must(t, err)
			case <-time.After(10 * time.Second):
				t.Fatal("the lock is free, and the call does not return")
			}
			pgtest.Eventually(t, 10*time.Second, "nobody asks any more", func() bool { return r.unheard.Load() == 0 })
			if e := rec.all(); patience == time.Minute && len(e) > 0 {
				t.Errorf("events %+v", e)
			}
			mustExec(t, conn, "SELECT pg_advisory_unlock_all()")
		})
	}
}
