package integration

// The conformance programs about faults: what goes wrong with a connection,
// what the caller is told, what database/sql retries, and what the pool keeps.

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"time"

	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

// kill ends all backends but the observer's, and waits until they are gone.
func (w *witness) kill() {
	w.Helper()
	var pids []int
	must(w, w.see.Conn().QueryRow(w.Context(), "SELECT coalesce(array_agg(pid), '{}') FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name <> 'pgtest observer'").Scan(&pids))
	w.see.Exec("SELECT pg_terminate_backend(pid) FROM unnest($1::int4[]) pid", pids)
	w.gone(pids...)
}

// gone waits until the server has ended the backends.
func (w *witness) gone(pids ...int) {
	w.Helper()
	pgtest.Eventually(w, 5*time.Second, "the backends are gone", func() (gone bool) {
		must(w, w.see.Conn().QueryRow(w.Context(), "SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = ANY($1::int4[])", pids).Scan(&gone))
		return gone
	})
}

func faults(w *witness) {
	ctx := w.Context()
	works := func(label string) {
		var n int
		w.say(label+", then", w.db.QueryRowContext(ctx, "SELECT 1").Scan(&n), n)
		w.stats(label + ", then")
	}
	// lost is for what meets a loss: nothing that was sent may be sent again, so
	// it may fail.
	lost := func(label string, do func() error) {
		w.sayLost(label, do())
		works(label)
	}
	// idle is lost for a loss that was not seen yet. How many connections have
	// to be found dead depends on which are asked before they are handed out
	// (pgx: those idle for a second), and with lib/pq on which errors make it
	// give one up.
	idle := func(label string, do func() error) {
		if w.neverPings {
			lost(label, do)
			return
		}
		if err := do(); err != nil && broken(err) != "connection lost" {
			w.say(label, err)
		}
		for n := 0; ; {
			err := w.db.QueryRowContext(ctx, "SELECT 1").Scan(&n)
			if err != nil && broken(err) == "connection lost" {
				continue
			}
			w.say(label+", then", err, n)
			return
		}
	}
	fill := func(n int) {
		var conns []*sql.Conn
		for range n {
			conns = append(conns, w.conn())
		}
		for _, c := range conns {
			if err := c.PingContext(ctx); errors.Is(err, driver.ErrBadConn) {
				continue // was dead, and is closed now: lib/pq asks nobody before
			} else if err != nil {
				w.Fatal(err)
			}
			must(w, c.Close())
		}
	}
	w.db.SetMaxIdleConns(3)

	fill(3)
	w.stats("three")
	for _, way := range []struct {
		name string
		do   func() error
	}{
		{"ping", func() error { return w.db.PingContext(ctx) }},
		{"query", func() error { var n int; return w.db.QueryRowContext(ctx, "SELECT 1").Scan(&n) }},
		{"exec", func() error { _, err := w.db.ExecContext(ctx, "SELECT 1"); return err }},
		{"begin", func() error {
			tx, err := w.db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			return tx.Commit()
		}},
		{"prepare", func() error {
			s, err := w.db.PrepareContext(ctx, "SELECT 1")
			if err != nil {
				return err
			}
			return s.Close()
		}},
		{"lock and unlock", func() error {
			_, err := w.db.ExecContext(ctx, "SELECT pg_advisory_lock(1), pg_advisory_unlock(1)")
			return err
		}},
		{"transaction lock", func() error { _, err := w.db.ExecContext(ctx, "SELECT pg_advisory_xact_lock(1)"); return err }},
	} {
		fill(2)
		w.kill()
		idle("killed while idle, "+way.name, way.do)
	}

	// On a connection of one's own there is nobody to try another one.
	conn := w.conn()
	must(w, conn.PingContext(ctx))
	w.kill()
	_, err := conn.ExecContext(ctx, "SELECT 1")
	w.sayLost("killed under a conn", err)
	_, err = conn.ExecContext(ctx, "SELECT 1")
	w.sayLost("killed under a conn, again", err)
	_, err = conn.BeginTx(ctx, nil)
	w.sayLost("killed under a conn, begin", err)
	w.sayLost("killed under a conn, ping", conn.PingContext(ctx))
	w.sayLost("killed under a conn, close", conn.Close())
	works("killed under a conn")

	// With a lock on it.
	conn = w.conn()
	_, err = conn.ExecContext(ctx, "SELECT pg_advisory_lock(3)")
	must(w, err)
	w.kill()
	w.held("killed under a lock")
	_, err = conn.ExecContext(ctx, "SELECT pg_advisory_unlock(3)")
	w.sayLost("killed under a lock, unlock", err)
	w.sayLost("killed under a lock, close", conn.Close())
	works("killed under a lock")

	tx, err := w.db.BeginTx(ctx, nil)
	must(w, err)
	w.kill()
	_, err = tx.ExecContext(ctx, "SELECT 1")
	w.sayLost("killed under a transaction", err)
	w.sayLost("killed under a transaction, commit", tx.Commit())
	works("killed under a transaction")
	tx, err = w.db.BeginTx(ctx, nil)
	must(w, err)
	w.kill()
	w.sayLost("killed under a transaction, rollback", tx.Rollback())
	works("killed under a transaction, rollback")

	lost("killed by itself", func() error {
		_, err := w.db.ExecContext(ctx, "SELECT pg_terminate_backend(pg_backend_pid()), pg_sleep(1)")
		return err
	})
	lost("killed while it waits for a lock", func() error {
		w.see.Lock(4)
		defer w.see.Unlock(4)
		conn := w.conn()
		defer conn.Close()
		result := make(chan error)
		go func() { _, err := conn.ExecContext(ctx, "SELECT pg_advisory_lock(4)"); result <- err }()
		w.see.WaitFor(5*time.Second, "it waits", func(locks []pgtest.Lock) bool { return len(locks) == 2 })
		w.see.Exec("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()")
		return <-result
	})

	// Canceled by somebody else: the connection lives.
	conn = w.conn()
	w.see.Lock(4)
	result := make(chan error)
	go func() { _, err := conn.ExecContext(ctx, "SELECT pg_advisory_lock(4)"); result <- err }()
	w.see.WaitFor(5*time.Second, "it waits", func(locks []pgtest.Lock) bool { return len(locks) == 2 })
	w.see.Exec("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()")
	w.say("canceled by another", <-result)
	w.see.Unlock(4)
	w.say("canceled by another, then", conn.PingContext(ctx), conn.Close())
	works("canceled by another")

	// What programs do.
	for _, way := range []struct {
		name string
		do   func(context.Context, *sql.Conn)
	}{
		{"rows left open", func(ctx context.Context, c *sql.Conn) {
			_, err := c.QueryContext(ctx, "SELECT generate_series(1, 100000)")
			w.say("rows left open", err)
		}},
		{"transaction left open", func(ctx context.Context, c *sql.Conn) {
			_, err := c.BeginTx(ctx, nil)
			w.say("transaction left open", err)
		}},
		{"BEGIN left open", func(ctx context.Context, c *sql.Conn) {
			_, err := c.ExecContext(ctx, "BEGIN")
			w.say("BEGIN left open", err)
		}},
		{"failed BEGIN left open", func(ctx context.Context, c *sql.Conn) {
			_, err := c.ExecContext(ctx, "BEGIN")
			must(w, err)
			_, err = c.ExecContext(ctx, "SELECT 1/0")
			w.say("failed BEGIN left open", err)
		}},
		{"panic in Raw", func(ctx context.Context, c *sql.Conn) {
			defer func() { w.say("panic in Raw", recover()) }()
			_ = c.Raw(func(any) error { panic("own") })
		}},
		{"ErrBadConn from Raw", func(ctx context.Context, c *sql.Conn) {
			w.say("ErrBadConn from Raw", c.Raw(func(any) error { return driver.ErrBadConn }))
		}},
		{"error from Raw", func(ctx context.Context, c *sql.Conn) {
			w.say("error from Raw", c.Raw(func(any) error { return errors.New("own") }))
		}},
		{"statement left open", func(ctx context.Context, c *sql.Conn) {
			_, err := c.PrepareContext(ctx, "SELECT 1")
			w.say("statement left open", err)
		}},
		{"session state", func(ctx context.Context, c *sql.Conn) {
			_, err := c.ExecContext(ctx, "SET search_path = nowhere")
			w.say("session state", err)
		}},
	} {
		conn := w.conn()
		until, cancel := context.WithCancel(ctx)
		way.do(until, conn)
		time.AfterFunc(30*time.Millisecond, cancel) // Close waits for rows and transactions that are open
		w.say(way.name+", close", conn.Close())
		cancel()
		// Whether the end of the context or Close comes first is a race, and
		// with lib/pq, whether its cancel or its rollback.
		if way.name != "rows left open" && !(w.driver == overPQ && way.name == "transaction left open") {
			w.stats(way.name)
		}
		works(way.name)
		var path string
		w.say(way.name+", path", w.db.QueryRow("SHOW search_path").Scan(&path), path)
	}

	// A context that ends, in all the places where rows and transactions may be.
	ctx, cancel := context.WithCancel(w.Context())
	rows, err := w.db.QueryContext(ctx, "SELECT generate_series(1, 1000000)")
	must(w, err)
	rows.Next()
	cancel()
	for rows.Next() {
	}
	w.say("rows under an ended context", text(traits(rows.Err())))
	_ = rows.Close() // its error depends on who closed them first
	ctx = w.Context()
	works("rows under an ended context")

	w.db.SetConnMaxLifetime(time.Nanosecond)
	fill(2)
	w.stats("lifetime over")
	works("lifetime over")
	w.db.SetConnMaxLifetime(0)
	w.db.SetMaxIdleConns(-1)
	w.stats("no idle ones")
	works("no idle ones")
}

// limits is about waiting for a connection, and what a full pool does.
func limits(w *witness) {
	ctx := w.Context()
	w.db.SetMaxOpenConns(2)
	w.db.SetMaxIdleConns(2)
	a, b := w.conn(), w.conn()
	short, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
	defer cancel()
	_, err := w.db.Conn(short)
	w.say("full", err)
	got := make(chan error)
	go func() {
		var n int
		got <- w.db.QueryRowContext(ctx, "SELECT 1").Scan(&n)
	}()
	pgtest.Eventually(w, 5*time.Second, "it waits", func() bool { return w.db.Stats().WaitCount == 2 })
	// What comes back dirty is clean for the waiter.
	_, err = a.ExecContext(ctx, "SELECT pg_advisory_lock(1), pg_advisory_unlock(1)")
	must(w, err)
	w.say("close", a.Close())
	w.say("waiter", <-got)
	w.say("close", b.Close())
	w.stats("two")
	// A waiter for one that comes back broken gets a new one.
	a, b = w.conn(), w.conn()
	go func() {
		var n int
		got <- w.db.QueryRowContext(ctx, "SELECT 1").Scan(&n)
	}()
	pgtest.Eventually(w, 5*time.Second, "it waits", func() bool { return w.db.Stats().WaitCount == 3 })
	w.say("bad", a.Raw(func(any) error { return driver.ErrBadConn }))
	w.say("waiter", <-got)
	w.say("close", b.Close())
	w.stats("one new")
	s := w.db.Stats()
	w.say("waited", s.WaitCount, s.MaxOpenConnections)
	// Closed while in use.
	a = w.conn()
	w.say("close the pool", w.db.Close())
	w.sayLost("still works", a.PingContext(ctx))
	w.say("close", a.Close())
	w.say("pool", fmt.Sprint(w.db.Stats().OpenConnections))
}
