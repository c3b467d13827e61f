package integration

// Random programs: what a program sees through database/sql is the same with
// pgadvlock also where nobody would have thought of the program.

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

var randomPrograms = flag.Int("programs", 6, "how many random programs TestRandomProgramsSeeTheSame runs over each driver")

// randomTexts are what a random program sends: what locks, what it locks in,
// and what takes locks away. %d is a key, and so is $1.
var randomTexts = []string{
	"SELECT pg_advisory_lock(%d)", "SELECT pg_advisory_lock_shared(%d)", "SELECT pg_try_advisory_lock(%d)", "SELECT pg_try_advisory_lock_shared(%d)",
	"SELECT pg_advisory_lock($1)", "SELECT pg_try_advisory_lock($1)", "SELECT pg_advisory_xact_lock($1)", "SELECT pg_try_advisory_xact_lock_shared($1)",
	"SELECT pg_advisory_xact_lock(%d)", "SELECT pg_try_advisory_xact_lock(%d)", "SELECT pg_advisory_xact_lock_shared(%d)", "SELECT pg_advisory_lock(7, %d)",
	"SELECT pg_advisory_unlock(%d)", "SELECT pg_advisory_unlock($1)", "SELECT pg_advisory_unlock_shared(%d)", "SELECT pg_advisory_unlock(7, %d)", "SELECT pg_advisory_unlock_all()",
	"SELECT pg_advisory_lock(%d), pg_advisory_unlock(%[1]d)", "SELECT pg_try_advisory_lock(%d), pg_try_advisory_xact_lock($1)", "SELECT pg_advisory_lock(NULL)", "SELECT pg_try_advisory_lock(NULL)",
	"SELECT pg_try_advisory_lock(%d) FROM generate_series(1, 2)", "DO $$ BEGIN PERFORM pg_advisory_lock(%d); END $$",
	"DO $$ BEGIN PERFORM pg_advisory_lock(%d); PERFORM 1/0; EXCEPTION WHEN division_by_zero THEN NULL; END $$",
	"SELECT pg_advisory_lock(%d); SELECT 1/0", "SELECT pg_advisory_lock(hashtext('k%d'))", "SELECT pg_advisory_lock(hashtextextended($1, 0))", "SELECT pg_advisory_unlock(hashtextextended($1, 0))",
	"SELECT %d", "SELECT %d/0", "SELECT $1::text", "SELECT * FROM nowhere", "SELECT pg_advisory_lock()",
	"SAVEPOINT a", "ROLLBACK TO a", "RELEASE a", "COMMIT AND CHAIN", "ROLLBACK AND CHAIN", "COMMIT; BEGIN", "BEGIN", "BEGIN; SAVEPOINT a", "COMMIT", "ROLLBACK",
	"PREPARE p AS SELECT pg_advisory_lock(%d)", "EXECUTE p", "DEALLOCATE p", "DISCARD PLANS", "SET lock_timeout = '10ms'", "SET LOCAL lock_timeout = '5ms'",
}

// actor is one of those who act in a random program, on a connection of its
// own.
type actor struct {
	*witness
	*rand.Rand
	ended context.Context
	conn  *sql.Conn
	pid   int
	tx    *sql.Tx
	stmts []preparedText
}

type preparedText struct {
	*sql.Stmt
	text string
}

// enter takes a connection. Nobody gives way in these programs, so that waits
// have to be short.
func (a *actor) enter() {
	a.Helper()
	a.conn, a.stmts = a.witness.conn(), nil
	before := a.pid
	must(a, a.conn.QueryRowContext(a.Context(), "SELECT pg_backend_pid() FROM set_config('lock_timeout', '10ms', false)").Scan(&a.pid))
	if before == 0 || a.pid == before {
		return
	}
	// The server takes its time to notice that a connection was closed.
	pgtest.Eventually(a, 10*time.Second, "the locks of the connection before are gone", func() (gone bool) {
		must(a, a.see.Conn().QueryRow(a.Context(), "SELECT count(*) = 0 FROM pg_locks WHERE locktype = 'advisory' AND pid = $1", before).Scan(&gone))
		return gone
	})
}

// leave gives the connection back: in observe as it is, where otherwise what it
// holds would be released.
func (a *actor) leave(label string, clean bool) {
	a.Helper()
	if a.tx != nil {
		a.say(label+", rollback", a.tx.Rollback())
		a.tx = nil
	}
	if clean || !a.observing {
		for _, query := range []string{"ROLLBACK", "SELECT pg_advisory_unlock_all()"} {
			_, err := a.conn.ExecContext(a.Context(), query)
			a.say(label+", "+query, err)
		}
	}
	a.say(label, a.conn.Close())
}

// args are the arguments of a text.
func (a *actor) args(text string) []any {
	switch key := 1 + a.IntN(3); {
	case !strings.Contains(text, "$1"):
		return nil
	case strings.Contains(text, "hashtext"), strings.Contains(text, "::text"):
		return []any{fmt.Sprint("k", key)}
	default:
		return []any{key}
	}
}

// act does one thing.
func (a *actor) act(label string) {
	text := randomTexts[a.IntN(len(randomTexts))]
	if strings.Contains(text, "%") {
		text = fmt.Sprintf(text, 1+a.IntN(3))
	}
	args := a.args(text)
	do, ctx := doer(a.conn), a.Context()
	if a.tx != nil {
		do = a.tx
	}
	// Not over lib/pq, which sends first, so that its cancel races; and not over
	// pgxpool, which gets the locked connection back then, without pgadvlock.
	if a.IntN(12) == 0 && a.driver == overPgx && a.title != "pgxpool" {
		ctx = a.ended
		label += ", ended"
	}
	say := func(way string) string { return fmt.Sprintf("%s, %s, %s %v", label, way, text, args) }
	switch a.IntN(24) {
	case 0, 1, 2, 3, 4, 5, 6:
		result, err := do.ExecContext(ctx, text, args...)
		a.result(say("exec"), result, err)
	case 7, 8, 9, 10:
		var first any
		a.say(say("row"), do.QueryRowContext(ctx, text, args...).Scan(&first), first)
	case 11, 12:
		rows, err := do.QueryContext(ctx, text, args...)
		a.say(say("rows"), err)
		if err == nil {
			a.say(say("rows, next"), rows.Next(), rows.Close(), rows.Err())
		}
	case 13, 14:
		stmt, err := do.PrepareContext(ctx, text)
		if a.say(say("prepare"), err); err == nil {
			a.stmts = append(a.stmts, preparedText{stmt, text})
		}
	case 15, 16, 17:
		if len(a.stmts) == 0 {
			return
		}
		stmt := a.stmts[a.IntN(len(a.stmts))]
		text, args = stmt.text, a.args(stmt.text)
		if a.tx != nil {
			ctx = a.Context() // with a transaction open, database/sql waits for ever where it wants to close the connection
		}
		switch a.IntN(5) {
		case 0, 1:
			result, err := stmt.ExecContext(ctx, args...)
			a.result(say("prepared exec"), result, err)
		case 2, 3:
			var first any
			a.say(say("prepared row"), stmt.QueryRowContext(ctx, args...).Scan(&first), first)
		case 4:
			a.say(say("close of a prepared one"), stmt.Close())
		}
	case 18, 19, 20, 21, 22:
		var err error
		switch {
		case a.tx == nil:
			options := &sql.TxOptions{Isolation: sql.IsolationLevel(a.IntN(3) * 2), ReadOnly: a.IntN(4) == 0}
			a.tx, err = a.conn.BeginTx(a.Context(), options)
			a.say(fmt.Sprint(label, ", begin ", *options), err)
		case a.IntN(2) == 0:
			err, a.tx = a.tx.Commit(), nil
			a.say(label+", commit", err)
		default:
			err, a.tx = a.tx.Rollback(), nil
			a.say(label+", rollback", err)
		}
	case 23:
		a.leave(label+", leave", false)
		a.enter()
		return
	}
	// The connection may be gone: by ErrBadConn, or by a COMMIT that failed.
	if err := a.conn.PingContext(a.Context()); err != nil {
		a.say(label+", lost", err)
		if a.tx != nil {
			a.say(label+", lost, rollback", a.tx.Rollback())
			a.tx = nil
		}
		a.say(label+", lost, close", a.conn.Close())
		a.enter()
	}
}

// randomProgram does what nobody would write, on two connections, and says what
// comes of each step and who holds what after it.
func randomProgram(seed uint64) func(*witness) {
	return func(w *witness) {
		r := rand.New(rand.NewPCG(seed, 1))
		ended, cancel := context.WithCancel(w.Context())
		cancel()
		var actors []*actor
		for range 2 {
			a := &actor{witness: w, Rand: r, ended: ended}
			a.enter()
			actors = append(actors, a)
		}
		for step := range 60 {
			who := r.IntN(len(actors))
			label := fmt.Sprintf("program %d, step %d, actor %d", seed, step, who)
			actors[who].act(label)
			w.held(label)
		}
		for _, a := range actors {
			a.leave("at the end", true)
		}
		w.stats("at the end")
		must(w, w.db.Close())
		w.see.WaitFor(10*time.Second, "the program has left nothing", func(locks []pgtest.Lock) bool { return len(locks) == 0 })
	}
}

// Programs that nobody would write see the same too: locks and transactions in
// every order, prepared and not, with errors in between. In observe also what
// they leave behind is the same.
func TestRandomProgramsSeeTheSame(t *testing.T) {
	server := pgtest.Shared(t)
	all := roads()
	for i, r := range all {
		t.Run(r.title, func(t *testing.T) {
			t.Parallel()
			if r.pooler {
				server.RequireBouncer(t)
			}
			db := server.NewDB(t)
			for n := range *randomPrograms {
				seed := uint64(n*len(all) + i) // not the same on each road
				t.Run(fmt.Sprint(seed), func(t *testing.T) {
					p := program{name: "random", run: randomProgram(seed)}
					plain := run(t, p, r, r.plain, server, db)
					wrapped := run(t, p, r, r.wrapped, server, db)
					if wrong := compare(r, p.name, plain, wrapped); len(wrong) > 0 {
						t.Error(wrong[0]) // what follows it follows from it
					}
				})
			}
		})
	}
}
