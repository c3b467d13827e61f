package pgadvlock_test

// One test for each public report: the smallest sequence that people ran into,
// and what becomes of it here. Reports that need other software are in
// integration/.

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgadvlock/pgadvlock"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

const warn = pgadvlock.LevelWarn

// assertRefused checks that nothing was locked and why.
func assertRefused(t *testing.T, b bench, err error, rule pgadvlock.Rule) {
	t.Helper()
	if !errors.Is(err, rule) {
		t.Errorf("error %v, want %s", err, rule)
	}
	if l := b.see.Locks(); len(l) > 0 {
		t.Errorf("locks %v", l)
	}
}

// assertReleased checks that nothing is held once the connection is back, and
// that the leak was reported with the line that took the lock.
func assertReleased(t *testing.T, b bench) {
	t.Helper()
	if l := b.see.Locks(); len(l) > 0 {
		t.Errorf("locks %v", l)
	}
	e := b.rec.of(pgadvlock.RuleLeakedSessionLock)
	if len(e) != 1 || len(e[0].Locks) == 0 || e[0].Locks[0].Caller.Line == 0 {
		t.Errorf("events %+v", b.rec.all())
	}
}

// A client takes a lock through transaction pooling and exits; the next one
// waits for it for ever.
func TestIssue_goauthentik23876(t *testing.T) {
	b := behind(t, "transaction")
	for range 2 {
		client := openDB(t, b.dsn, b.rec)
		assertRefused(t, b, onOne("SELECT pg_advisory_lock(42)")(t, client), pgadvlock.RuleTransactionPooling)
		must(t, client.Close())
	}
}

// A migration tool takes its lock through transaction pooling with pgx's
// default exec mode.
func TestIssue_mcpContextForge4051(t *testing.T) {
	b := behind(t, "transaction")
	db := openDB(t, strings.TrimSuffix(b.dsn, simple), b.rec)
	err := onOne("SELECT pg_advisory_lock(42)")(t, db)
	assertRefused(t, b, err, pgadvlock.RuleTransactionPooling)
	for _, wayOut := range []string{"pg_advisory_xact_lock", "directly", "session mode", "pgadvlock_pool_mode=session"} {
		if !strings.Contains(err.Error(), wayOut) {
			t.Errorf("no %q in: %v", wayOut, err)
		}
	}
}

// server_reset_query is not run in transaction mode, whatever it says.
func TestIssue_pgbouncer102_418(t *testing.T) {
	server := pgtest.Shared(t)
	bouncer := server.Bouncer(t, "server_reset_query=DISCARD ALL")
	name := server.NewDB(t)
	b := bench{rec: &recorder{}, see: pgtest.Observe(t, server.DSN(name))}
	b.db = openDB(t, bouncer.DSN(name, "transaction")+simple, b.rec)
	assertRefused(t, b, onOne("SELECT pg_advisory_lock(42)")(t, b.db), pgadvlock.RuleTransactionPooling)
}

// The migration lock: try on one backend, unlock on another.
func TestIssue_rails32622_31190(t *testing.T) {
	b := behind(t, "transaction")
	assertRefused(t, b, onOne("SELECT pg_try_advisory_lock(42)")(t, b.db), pgadvlock.RuleTransactionPooling)
	assertRefused(t, b, onOne("SELECT pg_advisory_unlock(42)")(t, b.db), pgadvlock.RuleTransactionPooling)
	session := behind(t, "session")
	must(t, onOne("SELECT pg_try_advisory_lock(42)", "SELECT pg_advisory_unlock(42)")(t, session.db))
	if e := session.rec.all(); len(e) > 0 {
		t.Errorf("events %v", e)
	}
}

// "Unable to obtain lock", and nobody could tell why.
func TestIssue_flyway2895_commcare4466(t *testing.T) {
	b := behind(t, "transaction")
	err := onOne("SELECT pg_try_advisory_lock(42)")(t, b.db)
	assertRefused(t, b, err, pgadvlock.RuleTransactionPooling)
	for _, want := range []string{"pool mode transaction: ", "backend", "; instead, use "} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in: %v", want, err)
		}
	}
}

// Refused at once, not after the 15 seconds that the caller would wait.
func TestIssue_golangMigrate1001_992_908(t *testing.T) {
	b := behind(t, "transaction")
	b.see.Lock(42)
	start := time.Now()
	if err := onOne("SELECT pg_advisory_lock(42)")(t, b.db); !errors.Is(err, pgadvlock.RuleTransactionPooling) {
		t.Errorf("error %v", err)
	}
	if d := time.Since(start); d > 5*time.Second {
		t.Errorf("after %s", d)
	}
}

// The wrong key is unlocked.
func TestIssue_golangMigrate130(t *testing.T) {
	b := setUp(t)
	must(t, onOne("SELECT pg_advisory_lock(1)", "SELECT pg_advisory_unlock(2)")(t, b.db))
	e := b.rec.of(pgadvlock.RuleUnlockNotHeld)
	if len(e) != 1 || len(e[0].Locks) != 2 || e[0].Locks[0].Key.String() != "2" || e[0].Locks[1].Key.String() != "1" || e[0].Locks[1].Caller.Line == 0 {
		t.Errorf("events %+v", e)
	}
	assertReleased(t, b)
}

func TestIssue_tern31_146(t *testing.T) {
	b := behind(t, "transaction")
	assertRefused(t, b, onOne("SELECT pg_advisory_lock(42)")(t, b.db), pgadvlock.RuleTransactionPooling)
}

// db.Exec lock, work, db.Exec unlock.
func TestIssue_goose191_crabTrap24_dbmate596(t *testing.T) {
	t.Run("refused, with file and line", func(t *testing.T) {
		b := setUp(t)
		_, err := b.db.ExecContext(ctxFor(t), "SELECT pg_advisory_lock(42)")
		assertRefused(t, b, err, pgadvlock.RulePooledSessionLock)
		if err != nil && !strings.Contains(err.Error(), "issues_test.go:") {
			t.Errorf("no call site in: %v", err)
		}
	})
	t.Run("at warn reported, and released at return", func(t *testing.T) {
		b := setUp(t, pgadvlock.WithRule(pgadvlock.RulePooledSessionLock, warn))
		mustExec(t, b.db, "SELECT pg_advisory_lock(42)")
		assertReleased(t, b)
		if len(b.rec.of(pgadvlock.RulePooledSessionLock)) != 1 {
			t.Errorf("events %v", b.rec.all())
		}
	})
	t.Run("in observe reported, and as on plain pgx", func(t *testing.T) {
		b := setUp(t, pgadvlock.WithPreset(pgadvlock.PresetObserve))
		mustExec(t, b.db, "SELECT pg_advisory_lock(42)")
		if !b.see.Held(42) || len(b.rec.of(pgadvlock.RulePooledSessionLock)) != 1 {
			t.Errorf("locks %v, events %v", b.see.Locks(), b.rec.all())
		}
		mustExec(t, b.db, "SELECT pg_advisory_unlock(42)")
	})
}

// Lock, Close, and the pooled connection keeps it.
func TestIssue_npgsql5592(t *testing.T) {
	b := setUp(t)
	must(t, onOne("SELECT pg_advisory_lock(42)")(t, b.db))
	if !b.see.TryLock(42) {
		t.Error("not free for others when Close returned")
	}
}

// Lock through the pool, unlock elsewhere, outage.
func TestIssue_vertx908_aiostreams975_mockforge968(t *testing.T) {
	b := setUp(t, pgadvlock.WithRule(pgadvlock.RulePooledSessionLock, warn))
	mustExec(t, b.db, "SELECT pg_advisory_lock(42)")
	must(t, onOne("SELECT pg_advisory_unlock(42)")(t, b.db))
	assertReleased(t, b)
	if len(b.rec.of(pgadvlock.RuleUnlockNotHeld)) != 1 {
		t.Errorf("events %v", b.rec.all())
	}
}

// COMMIT gives the connection back between lock and unlock.
func TestIssue_statgpt583_dstack3881(t *testing.T) {
	b := setUp(t)
	must(t, inTx(nil, "SELECT pg_advisory_lock(42)")(t, b.db))
	assertReleased(t, b)
}

// defer unlock, on a context that is over by then.
func TestIssue_wpmgr483_s3Orchestrator68_frontier1918_boundary918(t *testing.T) {
	b := setUp(t)
	func() {
		ctx, cancel := context.WithCancel(ctxFor(t))
		conn := mustConn(t, b.db)
		defer conn.Close()
		defer conn.ExecContext(ctx, "SELECT pg_advisory_unlock(42)")
		mustExec(t, conn, "SELECT pg_advisory_lock(42)")
		cancel()
	}()
	assertReleased(t, b)
}

// A wait ended in lock_timeout, and the lock was granted all the same: what the
// session holds counts, not what the caller was told. (For the race itself see
// TestGrantedAfterError.)
func TestIssue_distributedLock147_yugabyte26105(t *testing.T) {
	server := pgtest.Shared(t)
	dsn := server.DSN(server.NewDB(t))
	cfg, err := pgx.ParseConfig(dsn)
	must(t, err)
	see, rec := pgtest.Observe(t, dsn), &recorder{}
	c, err := pgadvlock.WrapConnector(tooLate{stdlib.GetConnector(*cfg)}, pgadvlock.WithEventHandler(rec.handle), pgadvlock.WithLogger(quiet()))
	must(t, err)
	db := sql.OpenDB(c)
	defer db.Close()
	conn := mustConn(t, db)
	defer conn.Close()
	mustExec(t, conn, "SELECT pg_try_advisory_lock(7)")
	var pg *pgconn.PgError
	if _, err := conn.ExecContext(ctxFor(t), "SELECT pg_advisory_lock($1)", 42); !errors.As(err, &pg) || pg.Code != "55P03" {
		t.Errorf("error %v", err)
	}
	if see.Held(42) || !see.Held(7) {
		t.Errorf("held after the error: %v", see.Locks())
	}
	if e := rec.all(); len(e) != 1 || e[0].Rule != pgadvlock.RuleGrantedAfterError || e[0].Locks[0].Key.String() != "42" || !errors.As(e[0].Err, &pg) || e[0].Caller.Line == 0 {
		t.Errorf("events %+v", e)
	}
}

// tooLate answers to a wait that it timed out, when it has succeeded.
type tooLate struct{ driver.Connector }

type (
	tooLateConn struct{ *stdlibConn }
	stdlibConn  = stdlib.Conn // so that the field is not named as the method that shows pgx's
)

func (c tooLate) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return tooLateConn{conn.(*stdlib.Conn)}, nil
}

func (c tooLateConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	result, err := c.stdlibConn.ExecContext(ctx, query, args)
	if err == nil && strings.Contains(query, "pg_advisory_lock(") {
		return nil, &pgconn.PgError{Severity: "ERROR", Code: "55P03", Message: "canceling statement due to lock timeout"}
	}
	return result, err
}

// In a failed transaction even the unlock fails.
func TestIssue_frappe40497_lakekeeper1790_hindsight4611(t *testing.T) {
	b := setUp(t)
	tx, err := b.db.BeginTx(ctxFor(t), nil)
	must(t, err)
	mustExec(t, tx, "SELECT pg_advisory_lock(42)")
	_, _ = tx.ExecContext(ctxFor(t), "SELECT 1/0")
	var pg *pgconn.PgError
	if _, err := tx.ExecContext(ctxFor(t), "SELECT pg_advisory_unlock(42)"); !errors.As(err, &pg) || pg.Code != "25P02" {
		t.Errorf("error %v", err)
	}
	must(t, tx.Rollback())
	assertReleased(t, b)
}

// A lock call in a CTE is evaluated twice; one unlock is not enough.
func TestIssue_que298_goodJob177_1735(t *testing.T) {
	b := setUp(t)
	must(t, onOne("WITH job AS MATERIALIZED (SELECT pg_try_advisory_lock(42) AS locked FROM generate_series(1, 2)) SELECT * FROM job WHERE locked LIMIT 1",
		"SELECT pg_advisory_unlock(42)")(t, b.db))
	if l := b.see.Locks(); len(l) > 0 {
		t.Errorf("locks %v", l)
	}
	if e := b.rec.of(pgadvlock.RuleUnlockNotHeld); len(e) > 0 {
		t.Errorf("invented: %v", e)
	}
}

// The manual's own warning: two rows, twenty locks.
func TestIssue_postgresqlManual1335(t *testing.T) {
	b := setUp(t)
	b.see.Exec("CREATE TABLE t AS SELECT generate_series(1, 20) AS id")
	must(t, onOne("SELECT id FROM t WHERE pg_try_advisory_lock(7, id) AND id % 5 = 0 ORDER BY id LIMIT 2")(t, b.db))
	if l := b.see.Locks(); len(l) > 0 {
		t.Errorf("locks %v", l)
	}
	leaked := b.rec.of(pgadvlock.RuleLeakedSessionLock)
	if len(b.rec.of(pgadvlock.RuleLockPerRow)) != 1 || len(leaked) != 1 || len(leaked[0].Locks) != 20 {
		t.Errorf("events %v", b.rec.all())
	}
}

// The context ends while the lock is waited for.
func TestIssue_sqlx4198(t *testing.T) {
	b := setUp(t)
	b.see.Lock(42)
	conn := mustConn(t, b.db)
	ctx, cancel := context.WithTimeout(ctxFor(t), 50*time.Millisecond)
	defer cancel()
	if _, err := conn.ExecContext(ctx, "SELECT pg_advisory_lock(42)"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
	_ = conn.Close()
	b.see.Unlock(42)
	b.see.WaitFor(time.Second, "nothing is held", func(l []pgtest.Lock) bool { return len(l) == 0 })
}

// "you don't own a lock of type ExclusiveLock", over and over.
func TestIssue_goodJob52_269_withAdvisoryLock43(t *testing.T) {
	b := setUp(t)
	conn := mustConn(t, b.db)
	defer conn.Close()
	for range 5 {
		mustExec(t, conn, "SELECT pg_advisory_unlock(42)")
	}
	e := b.rec.of(pgadvlock.RuleUnlockNotHeld)
	if len(e) != 5 || e[0].Caller.Line == 0 {
		t.Errorf("events %+v", e) // the log has one line: TestLogIsLimitedByCallSite
	}
}

// DISCARD ALL, then a prepared statement.
func TestIssue_supacloud537_deadpool57_pgx279_pgdog390(t *testing.T) {
	b := setUp(t, discardAll)
	b.db.SetMaxOpenConns(1)
	stmt, err := b.db.PrepareContext(ctxFor(t), "SELECT $1::int")
	must(t, err)
	defer stmt.Close()
	for range 2 {
		var n int
		must(t, b.db.QueryRowContext(ctxFor(t), "SELECT $1::int + 0", 1).Scan(&n))
		must(t, stmt.QueryRowContext(ctxFor(t), 1).Scan(&n))
		must(t, onOne("SELECT pg_advisory_lock(42)")(t, b.db))
	}
}

// Comments before, inside and after the call.
func TestIssue_pgx1423_sqlcommenter284(t *testing.T) {
	server := pgtest.Private(t, "log_statement=all")
	b := setUpOn(t, server.DSN("postgres"))
	const text = "/*traceparent='00-ab'*/ SELECT /* a /* nested */ b */ pg_advisory_lock -- to the end\n ( /* key */ 42 ) /*app='x',route='y'*/"
	mark := server.LogMark()
	must(t, onOne(text)(t, b.db))
	assertReleased(t, b)
	if e := b.rec.all(); len(e) > 0 && e[0].Locks[0].Key.String() != "42" {
		t.Errorf("key %v", e[0].Locks[0].Key)
	}
	if log := server.LogFrom(mark); !strings.Contains(strings.ReplaceAll(log, "\n\t", "\n"), text) {
		t.Errorf("the text reached the server changed:\n%s", log)
	}
}

// Two names, one hashtext key.
func TestIssue_brighter4145_symfony58838_khora738(t *testing.T) {
	b := setUp(t, pgadvlock.WithRule(pgadvlock.RuleWeakKey, warn))
	conn := mustConn(t, b.db)
	mustExec(t, conn, "SELECT pg_advisory_lock(hashtext($1))", "refunds")
	locks := b.see.Locks()
	must(t, conn.Close())
	weak, leaked := b.rec.of(pgadvlock.RuleWeakKey), b.rec.of(pgadvlock.RuleLeakedSessionLock)
	if len(weak) != 1 || len(leaked) != 1 || len(locks) != 1 {
		t.Fatalf("events %v, locks %v", b.rec.all(), locks)
	}
	if key, ok := leaked[0].Locks[0].Key.Bigint(); !ok || key != locks[0].Key {
		t.Errorf("reported as %v, pg_locks shows %v", leaked[0].Locks[0].Key, locks[0])
	}
}

// The row of a lock call is what pgx gives: TestResultsReachTheCallerUnchanged
// compares all forms.
func TestIssue_nodePostgres1610(t *testing.T) {
	b := setUp(t)
	conn := mustConn(t, b.db)
	defer conn.Close()
	var void string
	var got bool
	must(t, conn.QueryRowContext(ctxFor(t), "SELECT pg_advisory_lock(42), pg_advisory_unlock(42) AS got").Scan(&void, &got))
	if void != "" || !got {
		t.Errorf("void %q, got %t", void, got)
	}
}

// A lock on a connection that is held on purpose is no leak.
func TestIssue_lnd11071(t *testing.T) {
	b := setUp(t)
	conn := mustConn(t, b.db)
	mustExec(t, conn, "SELECT pg_advisory_lock(42)")
	for range 10 {
		mustExec(t, b.db, "SELECT 1")
	}
	if e := b.rec.all(); len(e) > 0 || !b.see.Held(42) {
		t.Errorf("events %v, locks %v", e, b.see.Locks())
	}
	mustExec(t, conn, "SELECT pg_advisory_unlock(42)")
	must(t, conn.Close())
}

// Column types of lock rows and others: TestResultsReachTheCallerUnchanged,
// and the conformance suite in integration/. Here: a session is reset.
func TestIssue_ddTraceGo908_sqlmw19_instrumentedsql52(t *testing.T) {
	server := pgtest.Shared(t)
	cfg, err := pgx.ParseConfig(server.DSN(server.NewDB(t)))
	must(t, err)
	resets := 0
	c, err := pgadvlock.WrapConnector(stdlib.GetConnector(*cfg, stdlib.OptionResetSession(func(context.Context, *pgx.Conn) error {
		resets++
		return nil
	})))
	must(t, err)
	db := sql.OpenDB(c)
	defer db.Close()
	for range 3 {
		mustExec(t, db, "SELECT 1")
	}
	if resets != 2 { // the first use of a connection resets nothing
		t.Errorf("%d resets", resets)
	}
}

// golang 41790: TestConnectorCloseIsForwarded. newrelic 435:
// TestRegisteredConnConfigNamesPassThrough.
