package integration

import (
	"context"
	"database/sql"
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

var randomPrograms = flag.Int("programs", 12, "how many random programs TestRandomProgramsSeeTheSame runs over each driver")

// randomTexts are what a random program sends: what locks, what it locks in,
// and what takes locks away. Two of them in one text, too.
var randomTexts = []string{
	"SELECT pg_advisory_lock(%d)", "SELECT pg_advisory_lock_shared(%d)", "SELECT pg_try_advisory_lock(%d)", "SELECT pg_try_advisory_lock_shared(%d)",
	"SELECT pg_advisory_xact_lock(%d)", "SELECT pg_try_advisory_xact_lock(%d)", "SELECT pg_advisory_xact_lock_shared(%d)", "SELECT pg_advisory_lock(7, %d)",
	"SELECT pg_advisory_unlock(%d)", "SELECT pg_advisory_unlock(%d)", "SELECT pg_advisory_unlock_shared(%d)", "SELECT pg_advisory_unlock(7, %d)", "SELECT pg_advisory_unlock_all()",
	"SELECT pg_advisory_lock(%d), pg_advisory_unlock(%[1]d)", "SELECT pg_try_advisory_lock(%d) FROM generate_series(1, 2)", "DO $$ BEGIN PERFORM pg_advisory_lock(%d); END $$",
	"SELECT pg_advisory_lock(%d); SELECT 1/0", "SELECT pg_advisory_lock(hashtext('k%d'))", "SELECT %d", "SELECT %d/0", "SELECT * FROM nowhere",
	"SAVEPOINT a", "ROLLBACK TO a", "RELEASE a", "COMMIT AND CHAIN", "ROLLBACK AND CHAIN", "COMMIT; BEGIN", "BEGIN", "COMMIT", "ROLLBACK",
	"PREPARE p AS SELECT pg_advisory_lock(%d)", "EXECUTE p", "DEALLOCATE p", "DISCARD PLANS", "SET lock_timeout = '20ms'", "SET LOCAL lock_timeout = '20ms'",
}

// randomProgram does what nobody would write, on two connections, and says what
// comes of each step and who holds what after it.
func randomProgram(seed uint64) func(*witness) {
	return func(w *witness) {
		r := rand.New(rand.NewPCG(seed, 1))
		ctx := w.Context()
		ended, cancel := context.WithCancel(ctx)
		cancel()
		type actor struct {
			conn  *sql.Conn
			tx    *sql.Tx
			stmts []*sql.Stmt
		}
		actors := []*actor{{conn: w.conn()}, {conn: w.conn()}}
		for _, a := range actors {
			_, err := a.conn.ExecContext(ctx, "SET lock_timeout = '20ms'")
			must(w, err)
		}
		for step := range 60 {
			who := r.IntN(len(actors))
			a := actors[who]
			text := randomTexts[r.IntN(len(randomTexts))]
			if strings.Contains(text, "%") {
				text = fmt.Sprintf(text, 1+r.IntN(3))
			}
			do, ctx := doer(a.conn), ctx
			if a.tx != nil {
				do = a.tx
			}
			if r.IntN(20) == 0 {
				ctx = ended
			}
			way := r.IntN(10)
			label := fmt.Sprintf("program %d, step %d, actor %d, way %d, %s", seed, step, who, way, text)
			switch way {
			case 0, 1, 2:
				result, err := do.ExecContext(ctx, text)
				w.result(label, result, err)
			case 3, 4:
				var first any
				w.say(label, do.QueryRowContext(ctx, text).Scan(&first), first)
			case 5:
				rows, err := do.QueryContext(ctx, text)
				w.say(label, err)
				if err == nil {
					w.say(label+", next", rows.Next(), rows.Close(), rows.Err())
				}
			case 6:
				stmt, err := do.PrepareContext(ctx, text)
				if w.say(label+", prepare", err); err == nil {
					a.stmts = append(a.stmts, stmt)
				}
			case 7:
				if len(a.stmts) == 0 {
					continue
				}
				stmt := a.stmts[r.IntN(len(a.stmts))]
				if r.IntN(2) == 0 {
					result, err := stmt.ExecContext(ctx)
					w.result(label, result, err)
				} else {
					var first any
					w.say(label, stmt.QueryRowContext(ctx).Scan(&first), first)
				}
			case 8, 9:
				var err error
				switch {
				case a.tx == nil:
					a.tx, err = a.conn.BeginTx(w.Context(), &sql.TxOptions{Isolation: sql.IsolationLevel(r.IntN(3) * 2)})
					label += ", begin"
				case r.IntN(2) == 0:
					err, a.tx = a.tx.Commit(), nil
					label += ", commit"
				default:
					err, a.tx = a.tx.Rollback(), nil
					label += ", rollback"
				}
				w.say(label, err)
			}
			w.held(label)
			if a.conn.PingContext(w.Context()) != nil { // the end of a context closed it
				w.say(label+", lost", a.conn.Close())
				w.see.WaitFor(5*time.Second, "its locks are free", func(l []pgtest.Lock) bool {
					n := 0
					must(w, w.see.Conn().QueryRow(w.Context(), "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()").Scan(&n))
					return n <= 2+w.db.Stats().Idle
				})
				*a = actor{conn: w.conn()}
				_, err := a.conn.ExecContext(w.Context(), "SET lock_timeout = '20ms'")
				must(w, err)
			}
		}
		for _, a := range actors {
			if a.tx != nil {
				w.say("at the end", a.tx.Rollback())
			}
			_, _ = a.conn.ExecContext(ctx, "ROLLBACK") // what a text began
			if !w.observing {
				_, _ = a.conn.ExecContext(ctx, "SELECT pg_advisory_unlock_all()")
			}
			w.say("close", a.conn.Close())
		}
		w.held("at the end")
	}
}

// Programs that nobody would write see the same too: locks and transactions in
// every order, prepared and not, with errors in between. In observe also what
// they leave behind is the same.
func TestRandomProgramsSeeTheSame(t *testing.T) {
	server := pgtest.Shared(t)
	for _, r := range roads() {
		if r.pooler || r.title == "pgxpool" {
			continue
		}
		t.Run(r.title, func(t *testing.T) {
			t.Parallel()
			db := server.NewDB(t)
			for seed := range uint64(*randomPrograms) {
				p := program{name: "random", run: randomProgram(seed)}
				plain := run(t, p, r, r.plain, server, db)
				wrapped := run(t, p, r, r.wrapped, server, db)
				if wrong := compare(r, p.name, plain, wrapped); len(wrong) > 0 {
					t.Fatal(wrong[0])
				}
			}
		})
	}
}
