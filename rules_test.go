package pgadvlock_test

// The discipline: what is told off, how it reads, and what is not.

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgadvlock/pgadvlock"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

// wrong is a program that a rule objects to. run returns what the program got.
type wrong struct {
	name string
	rule pgadvlock.Rule
	// level is that of the preset enforce.
	level pgadvlock.Level
	// key is in the report.
	key string
	run func(t *testing.T, db *sql.DB) error
}

func execOn(query string, args ...any) func(*testing.T, *sql.DB) error {
	return func(t *testing.T, db *sql.DB) error {
		_, err := db.ExecContext(ctxFor(t), query, args...)
		return err
	}
}

// inTx runs the statements in a transaction with the options and commits.
func inTx(opts *sql.TxOptions, statements ...string) func(*testing.T, *sql.DB) error {
	return func(t *testing.T, db *sql.DB) error {
		tx, err := db.BeginTx(ctxFor(t), opts)
		must(t, err)
		defer tx.Rollback()
		for _, s := range statements {
			if _, err := tx.ExecContext(ctxFor(t), s); err != nil {
				return err
			}
		}
		return tx.Commit()
	}
}

// onOne runs the statements on one connection.
func onOne(statements ...string) func(*testing.T, *sql.DB) error {
	return func(t *testing.T, db *sql.DB) error {
		conn := mustConn(t, db)
		defer conn.Close()
		for _, s := range statements {
			if _, err := conn.ExecContext(ctxFor(t), s); err != nil {
				return err
			}
		}
		return nil
	}
}

var repeatable = &sql.TxOptions{Isolation: sql.LevelRepeatableRead}

const items = "CREATE TABLE IF NOT EXISTS items (id int); INSERT INTO items SELECT generate_series(1, 20)"

var wrongs = []wrong{
	{"lock through the pool", pgadvlock.RulePooledSessionLock, pgadvlock.LevelError, "42", execOn("SELECT pg_advisory_lock(42)")},
	{"lock through the pool with an argument", pgadvlock.RulePooledSessionLock, pgadvlock.LevelError, "42", execOn("SELECT pg_advisory_lock($1)", 42)},
	{"try through the pool", pgadvlock.RulePooledSessionLock, pgadvlock.LevelError, "(4, 2)", func(t *testing.T, db *sql.DB) error {
		return db.QueryRowContext(ctxFor(t), "SELECT pg_try_advisory_lock(4, 2)").Scan(new(bool))
	}},
	{"unlock through the pool", pgadvlock.RulePooledSessionLock, pgadvlock.LevelError, "42", func(t *testing.T, db *sql.DB) error {
		rows, err := db.Query("SELECT pg_advisory_unlock(42)")
		if err == nil {
			rows.Close()
		}
		return err
	}},
	{"unlock all through the pool", pgadvlock.RulePooledSessionLock, pgadvlock.LevelError, "", execOn("SELECT pg_advisory_unlock_all()")},
	{"unlock of the wrong key", pgadvlock.RuleUnlockNotHeld, pgadvlock.LevelWarn, "43", onOne("SELECT pg_advisory_unlock(43)")},
	{"transaction lock in autocommit", pgadvlock.RuleXactLockAutocommit, pgadvlock.LevelWarn, "42", execOn("SELECT pg_advisory_xact_lock(42)")},
	{"transaction lock under REPEATABLE READ", pgadvlock.RuleSnapshotBeforeLock, pgadvlock.LevelWarn, "42", inTx(repeatable, "SELECT pg_advisory_xact_lock(42)")},
	{"the same by text", pgadvlock.RuleSnapshotBeforeLock, pgadvlock.LevelWarn, "42", onOne("BEGIN ISOLATION LEVEL REPEATABLE READ", "SELECT pg_advisory_xact_lock(42)", "COMMIT")},
	{"the same by START TRANSACTION", pgadvlock.RuleSnapshotBeforeLock, pgadvlock.LevelWarn, "42", onOne("  start transaction isolation level repeatable read", "SELECT pg_advisory_xact_lock(42)", "COMMIT")},
	{"the same by SET TRANSACTION", pgadvlock.RuleSnapshotBeforeLock, pgadvlock.LevelWarn, "42", inTx(nil, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", "SELECT pg_advisory_xact_lock_shared(42)")},
	{"the same by the session's default", pgadvlock.RuleSnapshotBeforeLock, pgadvlock.LevelWarn, "42", onOne("SET default_transaction_isolation = 'repeatable read'", "BEGIN", "SELECT pg_advisory_xact_lock(42)", "COMMIT")},
	{"lock for each row", pgadvlock.RuleLockPerRow, pgadvlock.LevelWarn, "", func(t *testing.T, db *sql.DB) error {
		must(t, onOne(items)(t, db))
		return onOne("SELECT id FROM items WHERE pg_try_advisory_lock(7, id) AND id % 5 = 0 ORDER BY id LIMIT 2")(t, db)
	}},
	{"lock for each row that a function makes", pgadvlock.RuleLockPerRow, pgadvlock.LevelWarn, "",
		onOne("SELECT k FROM unnest('{1,2,3}'::bigint[]) AS k WHERE pg_try_advisory_lock(k) LIMIT 1", "SELECT pg_advisory_unlock_all()")},
	{"leak", pgadvlock.RuleLeakedSessionLock, pgadvlock.LevelWarn, "42", onOne("SELECT pg_advisory_lock(42)")},
	{"opposite orders", pgadvlock.RuleLockOrder, pgadvlock.LevelWarn, "2", func(t *testing.T, db *sql.DB) error {
		must(t, onOne("SELECT pg_advisory_lock(1)", "SELECT pg_advisory_lock(2)", "SELECT pg_advisory_unlock_all()")(t, db))
		return onOne("SELECT pg_advisory_lock(2)", "SELECT pg_advisory_lock(1)", "SELECT pg_advisory_unlock_all()")(t, db)
	}},
	{"opposite orders in one statement each", pgadvlock.RuleLockOrder, pgadvlock.LevelWarn, "(0, 2)", func(t *testing.T, db *sql.DB) error {
		must(t, inTx(nil, "SELECT pg_advisory_xact_lock(0, 1), pg_advisory_xact_lock(0, 2)")(t, db))
		return inTx(nil, "SELECT pg_advisory_xact_lock(0, 2), pg_advisory_xact_lock(0, 1)")(t, db)
	}},
	{"upgrade", pgadvlock.RuleLockOrder, pgadvlock.LevelWarn, "42", inTx(nil, "SELECT pg_advisory_xact_lock_shared(42)", "SELECT pg_advisory_xact_lock(42)")},
	{"wait without an end", pgadvlock.RuleUnboundedWait, pgadvlock.LevelOff, "42", func(t *testing.T, db *sql.DB) error {
		conn := mustConn(t, db)
		defer conn.Close()
		_, err := conn.ExecContext(context.Background(), "SELECT pg_advisory_lock(42)")
		_, _ = conn.ExecContext(context.Background(), "SELECT pg_advisory_unlock_all()")
		return err
	}},
	{"hashtext", pgadvlock.RuleWeakKey, pgadvlock.LevelOff, "hashtext('…')", inTx(nil, "SELECT pg_advisory_xact_lock(hashtext('refunds'))")},
}

// afterTheFact are the rules that cannot keep a statement from being sent.
var afterTheFact = []pgadvlock.Rule{pgadvlock.RuleUnlockNotHeld, pgadvlock.RuleLeakedSessionLock, pgadvlock.RuleReturnHookHidden}

func TestWrongProgramsAreToldOff(t *testing.T) {
	for _, w := range wrongs {
		for _, level := range []pgadvlock.Level{pgadvlock.LevelOff, pgadvlock.LevelWarn, pgadvlock.LevelError} {
			t.Run(w.name+" at "+level.String(), func(t *testing.T) {
				server := pgtest.Shared(t)
				name := server.NewDB(t)
				rec := &recorder{}
				db := openDB(t, server.DSN(name), rec, pgadvlock.WithRule(w.rule, level))
				err := w.run(t, db)
				events := rec.of(w.rule)
				refuses := level == pgadvlock.LevelError && w.rule != pgadvlock.RuleLeakedSessionLock
				if refuses != errors.Is(err, w.rule) || !refuses && err != nil {
					t.Fatalf("error %v", err)
				}
				if level == pgadvlock.LevelOff {
					if len(events) > 0 {
						t.Errorf("events %v", events)
					}
					return
				}
				if len(events) != 1 {
					t.Fatalf("events %v", rec.all())
				}
				e := events[0]
				if e.Level != level || !strings.HasSuffix(e.Caller.File, "_test.go") || e.Caller.Line == 0 {
					t.Errorf("event %+v", e)
				}
				if w.key != "" && e.Locks[0].Key.String() != w.key {
					t.Errorf("key %q, want %q", e.Locks[0].Key, w.key)
				}
				if refuses {
					assertReads(t, err, w)
				}
			})
		}
	}
}

// assertReads checks that who sees only the error can fix the program.
func assertReads(t *testing.T, err error, w wrong) {
	t.Helper()
	var e *pgadvlock.RuleError
	if !errors.As(err, &e) {
		t.Fatalf("%v is no *RuleError", err)
	}
	for _, want := range []string{w.key, "_test.go:", "; instead, ", "docs/rules.md#" + string(w.rule)} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is missing in: %v", want, err)
		}
	}
}

// What is refused is not sent.
func TestRefusedStatementsDoNotReachTheServer(t *testing.T) {
	for _, w := range wrongs {
		if slices.Contains(afterTheFact, w.rule) {
			continue
		}
		t.Run(w.name, func(t *testing.T) {
			b := setUp(t, pgadvlock.WithRule(w.rule, pgadvlock.LevelError), pgadvlock.WithReset(pgadvlock.ResetOff))
			b.see.Exec("SET lock_timeout = '2s'")
			b.see.Exec("CREATE TABLE IF NOT EXISTS items (id int); INSERT INTO items SELECT generate_series(1, 20)")
			if err := w.run(t, b.db); !errors.Is(err, w.rule) {
				t.Fatalf("error %v", err)
			}
			l := b.see.Locks()
			if w.rule == pgadvlock.RuleLockOrder { // the first of the two was taken
				l = slices.DeleteFunc(l, func(l pgtest.Lock) bool { return l.Key == 2 })
			}
			if len(l) > 0 {
				t.Errorf("locks %v", l)
			}
		})
	}
}

func TestPresets(t *testing.T) {
	for _, w := range wrongs {
		t.Run(w.name, func(t *testing.T) {
			server := pgtest.Shared(t)
			for preset, want := range map[pgadvlock.Preset]pgadvlock.Level{
				pgadvlock.PresetObserve: min(w.level, pgadvlock.LevelWarn),
				pgadvlock.PresetEnforce: w.level,
				pgadvlock.PresetStrict:  strictLevel(w.rule),
			} {
				rec := &recorder{}
				db := openDB(t, server.DSN(server.NewDB(t)), rec, pgadvlock.WithPreset(preset))
				err := w.run(t, db)
				if errors.Is(err, w.rule) != (want == pgadvlock.LevelError) {
					t.Errorf("%v: error %v", preset, err)
				}
				if reported := len(rec.of(w.rule)) > 0; reported != (want > pgadvlock.LevelOff) {
					t.Errorf("%v: events %v", preset, rec.all())
				}
			}
		})
	}
}

// strictLevel is what docs/rules.md promises of the preset strict.
func strictLevel(r pgadvlock.Rule) pgadvlock.Level {
	if r == pgadvlock.RuleLeakedSessionLock || r == pgadvlock.RuleWeakKey || r == pgadvlock.RuleUnboundedWait {
		return pgadvlock.LevelWarn
	}
	return pgadvlock.LevelError
}

// Allow exempts one call and no other.
func TestAllow(t *testing.T) {
	b := setUp(t, pgadvlock.WithPreset(pgadvlock.PresetStrict))
	ctx := pgadvlock.Allow(ctxFor(t), pgadvlock.RuleXactLockAutocommit, pgadvlock.RuleWeakKey)
	const query = "SELECT pg_advisory_xact_lock(hashtext('a'))"
	if _, err := b.db.ExecContext(ctx, query); err != nil || len(b.rec.all()) > 0 {
		t.Errorf("allowed: %v, events %v", err, b.rec.all())
	}
	if _, err := b.db.ExecContext(pgadvlock.Allow(ctxFor(t), pgadvlock.RuleWeakKey), query); !errors.Is(err, pgadvlock.RuleXactLockAutocommit) {
		t.Errorf("not allowed: %v", err)
	}
	if _, err := b.db.ExecContext(pgadvlock.Allow(ctx, pgadvlock.RuleLockPerRow), query); err != nil {
		t.Errorf("allowed by the outer context: %v", err)
	}
}

// right are programs that are correct, though some look like wrong ones.
var right = []struct {
	name string
	run  func(t *testing.T, db *sql.DB) error
}{
	{"lock and unlock on one connection", onOne("SELECT pg_advisory_lock(42)", "SELECT 1", "SELECT pg_advisory_unlock(42)")},
	{"re-entrant, unlocked as often", onOne("SELECT pg_advisory_lock(42)", "SELECT pg_advisory_lock(42)", "SELECT pg_advisory_unlock(42)", "SELECT pg_advisory_unlock(42)")},
	{"unlock all", onOne("SELECT pg_advisory_lock(42), pg_advisory_lock(4, 2)", "SELECT pg_advisory_unlock_all()")},
	{"both modes", onOne("SELECT pg_advisory_lock(42)", "SELECT pg_advisory_lock_shared(42)", "SELECT pg_advisory_unlock(42)", "SELECT pg_advisory_unlock_shared(42)")},
	{"transaction lock in a transaction", inTx(nil, "SELECT pg_advisory_xact_lock(42)")},
	{"transaction lock by text", onOne("BEGIN", "SELECT pg_advisory_xact_lock(42)", "COMMIT")},
	{"transaction lock under SERIALIZABLE", inTx(&sql.TxOptions{Isolation: sql.LevelSerializable}, "SELECT pg_advisory_xact_lock(42)")},
	{"transaction lock after a REPEATABLE READ transaction", func(t *testing.T, db *sql.DB) error {
		db.SetMaxOpenConns(1)
		return errors.Join(inTx(repeatable, "SELECT 1")(t, db), inTx(nil, "SELECT pg_advisory_xact_lock(42)")(t, db),
			onOne("BEGIN ISOLATION LEVEL REPEATABLE READ", "COMMIT", "BEGIN", "SELECT pg_advisory_xact_lock(42)", "COMMIT")(t, db))
	}},
	{"try of a transaction lock in autocommit: is it taken?", execOn("SELECT pg_try_advisory_xact_lock(42)")},
	{"try under REPEATABLE READ", inTx(repeatable, "SELECT pg_try_advisory_xact_lock(42)")},
	{"session lock before a REPEATABLE READ transaction", onOne("SELECT pg_advisory_lock(42)", "BEGIN ISOLATION LEVEL REPEATABLE READ", "COMMIT", "SELECT pg_advisory_unlock(42)")},
	{"wait for a holder and hold nothing, through the pool", execOn("SELECT pg_advisory_lock(42), pg_advisory_unlock(42)")},
	{"self-contained text through the pool", execOn("SELECT pg_advisory_lock(42); SELECT 1; SELECT pg_advisory_unlock(42)")},
	{"self-contained DO through the pool", execOn("DO $$ BEGIN PERFORM pg_advisory_lock(42); PERFORM pg_advisory_unlock(42); END $$")},
	{"leader election: a stand-by asks and goes away", func(t *testing.T, db *sql.DB) error {
		leader, standby := mustConn(t, db), mustConn(t, db)
		defer leader.Close()
		defer standby.Close()
		mustExec(t, leader, "SELECT pg_advisory_lock(42)")
		for range 3 {
			var got bool
			must(t, standby.QueryRowContext(ctxFor(t), "SELECT pg_try_advisory_lock(42)").Scan(&got))
			if got {
				t.Error("two leaders")
			}
		}
		mustExec(t, leader, "SELECT pg_advisory_unlock(42)")
		return nil
	}},
	{"the keys that the program names, in order", func(t *testing.T, db *sql.DB) error {
		conn := mustConn(t, db)
		defer conn.Close()
		mustExec(t, conn, "SELECT pg_advisory_lock(k) FROM unnest($1::bigint[]) AS k ORDER BY k", "{3,1,2}")
		mustExec(t, conn, "SELECT pg_advisory_lock(k) FROM (VALUES (1), (2)) AS v(k) ORDER BY k")
		mustExec(t, conn, "SELECT pg_advisory_unlock_all()")
		return nil
	}},
	{"a function as a table", onOne("SELECT l.* FROM pg_try_advisory_lock(42) AS l", "SELECT pg_advisory_unlock_all()")},
	{"rows chosen in a subquery first, on purpose", func(t *testing.T, db *sql.DB) error {
		must(t, onOne(items)(t, db))
		conn := mustConn(t, db)
		defer conn.Close()
		ctx := pgadvlock.Allow(ctxFor(t), pgadvlock.RuleLockPerRow)
		_, err := conn.ExecContext(ctx, "SELECT pg_advisory_lock(id) FROM (SELECT id FROM items ORDER BY id LIMIT 2 OFFSET 0) AS chosen")
		mustExec(t, conn, "SELECT pg_advisory_unlock_all()")
		return err
	}},
	{"names only", onOne("SELECT 'pg_advisory_lock(1)' AS pg_advisory_lock", "SELECT 1 /* pg_advisory_lock(1) */", "SELECT 1 -- pg_advisory_lock(1)")},
	// golang-migrate's pgx/v5 driver
	{"golang-migrate", func(t *testing.T, db *sql.DB) error {
		conn := mustConn(t, db)
		defer conn.Close()
		mustExec(t, conn, "SELECT pg_advisory_lock($1)", "1283746529")
		mustExec(t, conn, "SELECT pg_advisory_unlock($1)", "1283746529")
		return nil
	}},
	// goose's session locker
	{"goose", func(t *testing.T, db *sql.DB) error {
		conn := mustConn(t, db)
		defer conn.Close()
		var locked, unlocked bool
		must(t, conn.QueryRowContext(ctxFor(t), "SELECT pg_try_advisory_lock($1)", int64(5887940537704921958)).Scan(&locked))
		must(t, conn.QueryRowContext(ctxFor(t), "SELECT pg_advisory_unlock($1)", int64(5887940537704921958)).Scan(&unlocked))
		if !locked || !unlocked {
			t.Errorf("locked %t, unlocked %t", locked, unlocked)
		}
		return nil
	}},
	{"one order everywhere", func(t *testing.T, db *sql.DB) error {
		lock := onOne("SELECT pg_advisory_lock(1)", "SELECT pg_advisory_lock(2)", "SELECT pg_advisory_unlock_all()")
		return errors.Join(lock(t, db), lock(t, db))
	}},
	{"opposite orders of share locks", func(t *testing.T, db *sql.DB) error {
		return errors.Join(onOne("SELECT pg_advisory_lock_shared(1)", "SELECT pg_advisory_lock_shared(2)", "SELECT pg_advisory_unlock_all()")(t, db),
			onOne("SELECT pg_advisory_lock_shared(2)", "SELECT pg_advisory_lock_shared(1)", "SELECT pg_advisory_unlock_all()")(t, db))
	}},
	{"opposite orders, one by try", func(t *testing.T, db *sql.DB) error {
		return errors.Join(onOne("SELECT pg_advisory_lock(1)", "SELECT pg_advisory_lock(2)", "SELECT pg_advisory_unlock_all()")(t, db),
			onOne("SELECT pg_advisory_lock(2)", "SELECT pg_try_advisory_lock(1)", "SELECT pg_advisory_unlock_all()")(t, db))
	}},
	{"opposite orders behind a gate", func(t *testing.T, db *sql.DB) error {
		return errors.Join(inTx(nil, "SELECT pg_advisory_xact_lock(9)", "SELECT pg_advisory_xact_lock(1)", "SELECT pg_advisory_xact_lock(2)")(t, db),
			inTx(nil, "SELECT pg_advisory_xact_lock(9)", "SELECT pg_advisory_xact_lock(2)", "SELECT pg_advisory_xact_lock(1)")(t, db))
	}},
	{"opposite orders, not held together", func(t *testing.T, db *sql.DB) error {
		return errors.Join(onOne("SELECT pg_advisory_lock(1)", "SELECT pg_advisory_unlock(1)", "SELECT pg_advisory_lock(2)", "SELECT pg_advisory_unlock(2)")(t, db),
			onOne("SELECT pg_advisory_lock(2)", "SELECT pg_advisory_unlock(2)", "SELECT pg_advisory_lock(1)", "SELECT pg_advisory_unlock(1)")(t, db))
	}},
	{"prepared on the pool, for a connection", func(t *testing.T, db *sql.DB) error {
		stmt, err := db.PrepareContext(ctxFor(t), "SELECT pg_advisory_xact_lock($1)")
		must(t, err)
		defer stmt.Close()
		tx, err := db.BeginTx(ctxFor(t), nil)
		must(t, err)
		defer tx.Rollback()
		_, err = tx.StmtContext(ctxFor(t), stmt).ExecContext(ctxFor(t), 42)
		return err
	}},
	{"a NULL key locks nothing", onOne("SELECT pg_advisory_lock(NULL)", "SELECT pg_advisory_unlock(NULL)")},
}

func TestRightProgramsAreNotToldOff(t *testing.T) {
	for _, r := range right {
		for _, preset := range []pgadvlock.Preset{pgadvlock.PresetEnforce, pgadvlock.PresetStrict} {
			t.Run(r.name+" in "+preset.String(), func(t *testing.T) {
				b := setUp(t, pgadvlock.WithPreset(preset))
				if err := r.run(t, b.db); err != nil {
					t.Fatal(err)
				}
				if l := b.see.Locks(); len(l) > 0 {
					t.Errorf("locks %v", l)
				}
				if e := b.rec.all(); len(e) > 0 {
					t.Errorf("events %v", e)
				}
			})
		}
	}
}

// PostgreSQL's own errors stay what they are.
func TestServerErrorsPassThrough(t *testing.T) {
	b := setUp(t)
	conn := mustConn(t, b.db)
	defer conn.Close()
	b.see.Lock(42)
	mustExec(t, conn, "SET lock_timeout = '10ms'")
	var pg *pgconn.PgError
	if _, err := conn.ExecContext(ctxFor(t), "SELECT pg_advisory_lock(42)"); !errors.As(err, &pg) || pg.Code != "55P03" {
		t.Errorf("error %v", err)
	}
}

func TestLogIsLimitedByCallSite(t *testing.T) {
	var log bytes.Buffer
	server := pgtest.Shared(t)
	rec := &recorder{}
	db := openDB(t, server.DSN(server.NewDB(t)), rec, pgadvlock.WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
	for range 5 {
		must(t, onOne("SELECT pg_advisory_lock(42)")(t, db))
	}
	if n := strings.Count(log.String(), "rule=leaked-session-lock"); n != 1 || len(rec.all()) != 5 {
		t.Errorf("logged %d times, handled %d times:\n%s", n, len(rec.all()), &log)
	}
	for _, want := range []string{"level=WARN", "key=42", "mode=exclusive", "count=1", "held_since=", "caller=", "rules_test.go:", "backend_pid=", "pool_mode=direct", "fix="} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("%q is missing in:\n%s", want, &log)
		}
	}
}

func TestPanickingHandlerIsSurvived(t *testing.T) {
	var log bytes.Buffer
	server := pgtest.Shared(t)
	c, err := pgadvlock.NewConnector(server.DSN(server.NewDB(t)), pgadvlock.WithLogger(slog.New(slog.NewTextHandler(&log, nil))),
		pgadvlock.WithEventHandler(func(context.Context, pgadvlock.Event) { panic("no") }))
	must(t, err)
	db := sql.OpenDB(c)
	defer db.Close()
	db.SetMaxOpenConns(1)
	for range 3 {
		must(t, onOne("SELECT pg_advisory_lock(42)")(t, db))
	}
	if n := strings.Count(log.String(), "handler panicked"); n != 3 || db.Stats().Idle != 1 {
		t.Errorf("panics logged %d times, stats %+v", n, db.Stats())
	}
}

func TestSetRulePanicsOnAnUnknownName(t *testing.T) {
	b := setUp(t)
	c, _ := pgadvlock.ConnectorOf(b.db)
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	c.SetRule("no-such-rule", pgadvlock.LevelWarn)
}
