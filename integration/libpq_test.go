// Package integration runs pgadvlock under and over other people's software.
// It is a module of its own, so that none of that reaches a user's build.
package integration

import (
	"context"
	"database/sql"
	"log/slog"
	"testing"
	"time"

	"github.com/lib/pq"

	"github.com/pgadvlock/pgadvlock"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

// leaks are programs that give a connection back with key 42 or (4, 2) held.
var leaks = map[string]func(*testing.T, *sql.Conn){
	"exec":     func(t *testing.T, c *sql.Conn) { exec(t, c, "SELECT pg_advisory_lock(42)") },
	"pair":     func(t *testing.T, c *sql.Conn) { exec(t, c, "SELECT pg_advisory_lock_shared($1, $2)", 4, 2) },
	"argument": func(t *testing.T, c *sql.Conn) { exec(t, c, "SELECT pg_try_advisory_lock($1)", 42) },
	"three": func(t *testing.T, c *sql.Conn) {
		exec(t, c, "SELECT pg_advisory_lock(42), pg_advisory_lock(42), pg_advisory_lock(42)")
	},
	"DO":        func(t *testing.T, c *sql.Conn) { exec(t, c, "DO $$ BEGIN PERFORM pg_advisory_lock(42); END $$") },
	"left open": func(t *testing.T, c *sql.Conn) { exec(t, c, "SELECT pg_advisory_lock(42)"); exec(t, c, "BEGIN") },
	"query": func(t *testing.T, c *sql.Conn) {
		var got bool
		if err := c.QueryRowContext(t.Context(), "SELECT pg_try_advisory_lock($1)", 42).Scan(&got); err != nil || !got {
			t.Fatalf("got %t, %v", got, err)
		}
	},
	"prepared": func(t *testing.T, c *sql.Conn) {
		stmt, err := c.PrepareContext(t.Context(), "SELECT pg_advisory_lock($1)")
		if err != nil {
			t.Fatal(err)
		}
		defer stmt.Close()
		if _, err := stmt.ExecContext(t.Context(), 42); err != nil {
			t.Fatal(err)
		}
	},
	"failed transaction": func(t *testing.T, c *sql.Conn) {
		tx, err := c.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tx.ExecContext(t.Context(), "SELECT pg_advisory_lock(42)"); err != nil {
			t.Fatal(err)
		}
		if _, err := tx.ExecContext(t.Context(), "SELECT 1/0"); err == nil {
			t.Error("1/0 succeeded")
		}
		if err := tx.Rollback(); err != nil {
			t.Fatal(err)
		}
	},
}

func exec(t *testing.T, c *sql.Conn, query string, args ...any) {
	t.Helper()
	if _, err := c.ExecContext(t.Context(), query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// openPQ wraps lib/pq.
func openPQ(t *testing.T, dsn string, events chan pgadvlock.Event, opts ...pgadvlock.Option) *sql.DB {
	t.Helper()
	base, err := pq.NewConnector(dsn)
	if err != nil {
		t.Fatal(err)
	}
	c, err := pgadvlock.WrapConnector(base, append(opts, pgadvlock.WithLogger(slog.New(slog.DiscardHandler)),
		pgadvlock.WithEventHandler(func(_ context.Context, e pgadvlock.Event) { events <- e }))...)
	if err != nil {
		t.Fatal(err)
	}
	db := sql.OpenDB(c)
	t.Cleanup(func() { db.Close() })
	return db
}

// Over lib/pq told to be direct, nothing is held when Close has returned.
// Without being told, the driver cannot know, and closes the connection.
func TestNothingLeaksOverLibPQ(t *testing.T) {
	server := pgtest.Shared(t)
	for name, leak := range leaks {
		for _, told := range []bool{true, false} {
			t.Run(name+map[bool]string{true: ", direct", false: ", not told"}[told], func(t *testing.T) {
				dsn := server.DSN(server.NewDB(t))
				see, events := pgtest.Observe(t, dsn), make(chan pgadvlock.Event, 10)
				var opts []pgadvlock.Option
				if told {
					opts = append(opts, pgadvlock.WithPoolMode(pgadvlock.PoolDirect))
				}
				db := openPQ(t, dsn, events, opts...)
				conn, err := db.Conn(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				leak(t, conn)
				if err := conn.Close(); err != nil {
					t.Fatal(err)
				}
				if told {
					if locks := see.Locks(); len(locks) > 0 {
						t.Errorf("locks %v", locks)
					}
				} else {
					see.WaitFor(time.Second, "nothing is held", func(l []pgtest.Lock) bool { return len(l) == 0 })
				}
				if kept := db.Stats().Idle == 1; kept != (told && name != "left open") {
					t.Errorf("the connection was kept: %t", kept)
				}
				if len(events) == 0 {
					t.Error("nothing was reported")
				}
			})
		}
	}
}

// Over lib/pq there is no pgx connection to hand out, and no way to find out
// what stands before the server.
func TestRawOverLibPQ(t *testing.T) {
	server := pgtest.Shared(t)
	db := openPQ(t, server.DSN(server.NewDB(t)), make(chan pgadvlock.Event, 10))
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	err = conn.Raw(func(c any) error {
		ours := c.(*pgadvlock.Conn)
		if ours.Conn() != nil {
			t.Error("a pgx connection over lib/pq")
		}
		mode, evidence, err := ours.PoolMode(t.Context())
		if mode != pgadvlock.PoolUnknown || evidence == "" {
			t.Errorf("pool mode %s, %q", mode, evidence)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}
