package pgadvlock_test

// What docs/rules.md says becomes of each wrong program on plain pgx, and that
// the code printed there is code that compiles.

import (
	"context"
	"database/sql"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

func TestOnPlainPgx(t *testing.T) {
	server := pgtest.Shared(t)
	open := func(t *testing.T, dsn string) *sql.DB {
		db, err := sql.Open("pgx", dsn)
		must(t, err)
		t.Cleanup(func() { db.Close() })
		return db
	}
	set := func(t *testing.T) (*sql.DB, *pgtest.Observer) {
		dsn := server.DSN(server.NewDB(t))
		return open(t, dsn), pgtest.Observe(t, dsn)
	}
	unlocked := func(t *testing.T, db interface {
		QueryRowContext(context.Context, string, ...any) *sql.Row
	}, query string) (ok bool) {
		must(t, db.QueryRowContext(ctxFor(t), query).Scan(&ok))
		return ok
	}

	t.Run("pooled-session-lock", func(t *testing.T) {
		db, see := set(t)
		mustExec(t, db, "SELECT pg_advisory_lock(42)")
		other := mustConn(t, db) // another request uses that connection
		defer other.Close()
		if unlocked(t, db, "SELECT pg_advisory_unlock(42)") || !see.Held(42) {
			t.Error("the unlock did not miss")
		}
	})
	t.Run("transaction-pooling", func(t *testing.T) {
		server.RequireBouncer(t)
		dsn := server.BouncerDSN(server.NewDB(t), "transaction") + "&default_query_exec_mode=exec"
		a, b := open(t, dsn), open(t, dsn)
		if !unlocked(t, a, "SELECT pg_try_advisory_lock(42)") || !unlocked(t, b, "SELECT pg_try_advisory_lock(42)") {
			t.Error("not both were told that they hold the lock")
		}
		must(t, a.Close())
		must(t, b.Close())
		if !pgtest.Observe(t, dsn).Held(42) {
			t.Error("the lock did not outlive its clients")
		}
	})
	t.Run("leaked-session-lock", func(t *testing.T) {
		db, see := set(t)
		must(t, onOne("SELECT pg_advisory_lock(42)")(t, db))
		if !see.Held(42) || !unlocked(t, db, "SELECT pg_try_advisory_lock(42)") {
			t.Error("the next user of the connection was not told that it has the lock")
		}
	})
	t.Run("unlock-not-held", func(t *testing.T) {
		db, see := set(t)
		conn := mustConn(t, db)
		defer conn.Close()
		mustExec(t, conn, "SELECT pg_advisory_lock(0, 42)")
		if unlocked(t, conn, "SELECT pg_advisory_unlock(42)") || !see.HeldPair(0, 42) {
			t.Error("the unlock did not miss")
		}
	})
	t.Run("xact-lock-autocommit", func(t *testing.T) {
		db, see := set(t)
		mustExec(t, db, "SELECT pg_advisory_xact_lock(42)")
		if see.Held(42) {
			t.Error("the lock is held")
		}
	})
	t.Run("snapshot-before-lock", func(t *testing.T) {
		db, see := set(t)
		mustExec(t, db, "CREATE TABLE done (id int)")
		see.Lock(42)
		read := make(chan int, 1)
		go func() {
			n := -1
			defer func() { read <- n }()
			tx, err := db.BeginTx(context.Background(), repeatable)
			if err != nil {
				return
			}
			defer tx.Rollback()
			if _, err := tx.Exec("SELECT pg_advisory_xact_lock(42)"); err == nil {
				_ = tx.QueryRow("SELECT count(*) FROM done").Scan(&n)
			}
		}()
		pgtest.Eventually(t, 5*time.Second, "a waiter", func() bool { return see.Waiting(42) })
		see.Exec("INSERT INTO done VALUES (1)")
		see.Unlock(42)
		if n := <-read; n != 0 {
			t.Errorf("read %d rows, want the snapshot's 0", n)
		}
	})
	t.Run("lock-per-row", func(t *testing.T) {
		db, see := set(t)
		mustExec(t, db, items)
		conn := mustConn(t, db)
		defer conn.Close()
		rows, err := conn.QueryContext(ctxFor(t), "SELECT id FROM items WHERE pg_try_advisory_lock(7, id) AND id % 5 = 0 ORDER BY id LIMIT 2")
		must(t, err)
		n := 0
		for rows.Next() {
			n++
		}
		must(t, rows.Err())
		if locks := see.Locks(); n != 2 || len(locks) != 20 {
			t.Errorf("%d rows, %d locks", n, len(locks))
		}
	})
	t.Run("weak-key", func(t *testing.T) {
		db, see := set(t)
		var a, b string
		must(t, db.QueryRowContext(ctxFor(t), `SELECT min(n), max(n) FROM (SELECT 'job-' || i AS n FROM generate_series(1, 300000) i) AS names
			GROUP BY hashtext(n) HAVING count(*) > 1 LIMIT 1`).Scan(&a, &b))
		conn, other := mustConn(t, db), mustConn(t, db)
		defer conn.Close()
		defer other.Close()
		mustExec(t, conn, "SELECT pg_advisory_lock(hashtext($1))", a)
		var ok bool
		must(t, other.QueryRowContext(ctxFor(t), "SELECT pg_try_advisory_lock(hashtext($1))", b).Scan(&ok))
		if a == b || ok || len(see.Locks()) != 1 {
			t.Errorf("%q and %q do not collide", a, b)
		}
	})
}

func TestRulesDoc(t *testing.T) {
	doc, err := os.ReadFile("docs/rules.md")
	must(t, err)
	code, err := os.ReadFile("rules_example_test.go")
	must(t, err)
	flat := func(s string) string { return strings.Join(strings.Fields(s), " ") }
	n := 0
	for i, block := range strings.Split(string(doc), "```") {
		body, isGo := strings.CutPrefix(block, "go\n")
		if i%2 == 0 || !isGo || strings.HasPrefix(body, "// wrong") {
			continue
		}
		n++
		if !strings.Contains(flat(string(code)), flat(body)) {
			t.Errorf("not in rules_example_test.go:\n%s", body)
		}
	}
	if n < 5 {
		t.Errorf("only %d blocks of code found", n)
	}
	for _, w := range wrongs {
		if !strings.Contains(string(doc), "\n## "+string(w.rule)+"\n") {
			t.Errorf("no section for %s", w.rule)
		}
	}
}
