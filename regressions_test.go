package pgadvlock_test

// Programs that once got a lock past the ledger, a false report, or a
// transaction left open: each stays a test.

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"go.opentelemetry.io/otel/metric"
	mnoop "go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/pgadvlock/pgadvlock"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

// ---- helpers

type regressionInner = stdlib.Conn
type regressionConn struct {
	*regressionInner
	after func(ctx context.Context, query string, c *pgx.Conn) error
}

func (c regressionConn) ExecContext(ctx context.Context, q string, a []driver.NamedValue) (driver.Result, error) {
	r, err := c.regressionInner.ExecContext(ctx, q, a)
	if err == nil {
		if e := c.after(ctx, q, c.regressionInner.Conn()); e != nil {
			return nil, e
		}
	}
	return r, err
}

type regressionConnector struct {
	driver.Connector
	after func(ctx context.Context, query string, c *pgx.Conn) error
}

func (b regressionConnector) Connect(ctx context.Context) (driver.Conn, error) {
	c, err := b.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return regressionConn{c.(*stdlib.Conn), b.after}, nil
}

type regressionSpan struct {
	noop.Span
	name  string
	ended *int
}

func (s regressionSpan) IsRecording() bool          { return true }
func (s regressionSpan) End(...trace.SpanEndOption) { *s.ended++ }

type regressionTracer struct {
	noop.Tracer
	mu    sync.Mutex
	spans []regressionSpan
}

func (t *regressionTracer) Start(ctx context.Context, name string, _ ...trace.SpanStartOption) (context.Context, trace.Span) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := regressionSpan{name: name, ended: new(int)}
	t.spans = append(t.spans, s)
	return ctx, s
}

type regressionProvider struct {
	noop.TracerProvider
	t *regressionTracer
}

func (p regressionProvider) Tracer(string, ...trace.TracerOption) trace.Tracer { return p.t }

func (t *regressionTracer) check(tt *testing.T) {
	tt.Helper()
	for _, s := range t.spans {
		if *s.ended != 1 {
			tt.Errorf("span %q ended %d times", s.name, *s.ended)
		}
	}
}

func noEvents(t *testing.T, rec *recorder) {
	t.Helper()
	for _, e := range rec.all() {
		t.Errorf("event %s locks=%v err=%v", e.Rule, e.Locks, e.Err)
	}
}

func mustTx(t *testing.T, conn *sql.Conn, o *sql.TxOptions) *sql.Tx {
	t.Helper()
	tx, err := conn.BeginTx(ctxFor(t), o)
	must(t, err)
	return tx
}

// ---- findings

// A: ctx cancelled before the first lock.
func TestRegressionCancelledBeforeFirstLock(t *testing.T) {
	for _, plain := range []bool{true, false} {
		b := setUp(t)
		db := b.db
		if plain {
			p, err := sql.Open("pgx", b.dsn)
			must(t, err)
			defer p.Close()
			db = p
		}
		conn := mustConn(t, db)
		ctx, cancel := context.WithCancel(ctxFor(t))
		cancel()
		_, err := conn.ExecContext(ctx, "SELECT pg_advisory_lock(42)")
		_, err2 := conn.ExecContext(ctxFor(t), "SELECT pg_advisory_lock(42)")
		t.Logf("plain=%t: first %v; then %v", plain, err, err2)
		if !plain {
			noEvents(t, b.rec)
			c, _ := pgadvlock.ConnectorOf(b.db)
			t.Logf("%+v", c.Sessions())
			// The whole connector: are dead_peer settings still made on another connection?
			other := mustConn(t, b.db)
			mustExec(t, other, "SELECT pg_advisory_lock(43)")
			var idle string
			must(t, other.QueryRowContext(ctxFor(t), "SHOW tcp_keepalives_idle").Scan(&idle))
			if idle != "30" {
				t.Errorf("another connection's tcp_keepalives_idle is %s", idle)
			}
			other.Close()
		}
		conn.Close()
	}
}

type pointerValuer struct{ n int64 }

func (p *pointerValuer) Value() (driver.Value, error) {
	if p == nil {
		return int64(42), nil
	}
	return p.n, nil
}

// B: nil pointer Valuer that is not NULL.
func TestRegressionNilPointerValuer(t *testing.T) {
	b := setUp(t)
	conn := mustConn(t, b.db)
	mustExec(t, conn, "SELECT pg_advisory_lock($1)", (*pointerValuer)(nil))
	if !b.see.Held(42) {
		t.Skip("pgx sends NULL")
	}
	must(t, conn.Close())
	if b.see.Held(42) {
		t.Errorf("held in the pool; idle %d", b.db.Stats().Idle)
	}
}

// C: hook's locks.
func TestRegressionHookLock(t *testing.T) {
	b := setUp(t, pgadvlock.WithAfterConnect(func(ctx context.Context, c *pgx.Conn) error {
		_, err := c.Exec(ctx, "SELECT pg_advisory_lock(42)")
		return err
	}))
	conn := mustConn(t, b.db)
	mustExec(t, conn, "SELECT 1")
	must(t, conn.Close())
	if b.see.Held(42) {
		t.Errorf("held in the pool; idle %d", b.db.Stats().Idle)
	}
}

// D: pgx's named prepared statements, in a hook and through Raw.
func TestRegressionNamedPrepared(t *testing.T) {
	t.Run("hook", func(t *testing.T) {
		b := setUp(t, pgadvlock.WithAfterConnect(func(ctx context.Context, c *pgx.Conn) error {
			_, err := c.Prepare(ctx, "take", "SELECT pg_advisory_lock($1)")
			return err
		}))
		conn := mustConn(t, b.db)
		mustExec(t, conn, "take", 42)
		must(t, conn.Close())
		if b.see.Held(42) {
			t.Errorf("held in the pool; idle %d", b.db.Stats().Idle)
		}
	})
	t.Run("raw", func(t *testing.T) {
		b := setUp(t)
		b.db.SetMaxOpenConns(1)
		conn := mustConn(t, b.db)
		raw(t, conn, func(c *pgx.Conn) error {
			_, err := c.Prepare(ctxFor(t), "take", "SELECT pg_advisory_lock($1)")
			return err
		})
		must(t, conn.Close())
		mustExec(t, b.db, "take", 42)
		if b.see.Held(42) {
			t.Errorf("held in the pool; idle %d", b.db.Stats().Idle)
		}
	})
	t.Run("raw, SQL EXECUTE", func(t *testing.T) {
		b := setUp(t)
		b.db.SetMaxOpenConns(1)
		conn := mustConn(t, b.db)
		raw(t, conn, func(c *pgx.Conn) error {
			_, err := c.Exec(ctxFor(t), "PREPARE take AS SELECT pg_advisory_lock(42)")
			return err
		})
		must(t, conn.Close())
		mustExec(t, b.db, "EXECUTE take")
		if b.see.Held(42) {
			t.Errorf("held in the pool; idle %d", b.db.Stats().Idle)
		}
	})
}

// E: prepared statements of steps, prepared before the connection was armed.
func TestRegressionPreparedSteps(t *testing.T) {
	t.Run("savepoint", func(t *testing.T) {
		b := setUp(t)
		conn := mustConn(t, b.db)
		defer conn.Close()
		sp, err := conn.PrepareContext(ctxFor(t), "SAVEPOINT s")
		must(t, err)
		defer sp.Close()
		tx := mustTx(t, conn, nil)
		defer tx.Rollback()
		mustExec(t, tx, "SELECT pg_advisory_xact_lock(1)")
		_, err = tx.Stmt(sp).Exec()
		must(t, err)
		mustExec(t, tx, "SELECT pg_advisory_xact_lock(2)")
		mustExec(t, tx, "ROLLBACK TO s")
		c, _ := pgadvlock.ConnectorOf(b.db)
		if s := c.Sessions(); len(s) != 1 || len(s[0].Held) != 1 {
			t.Errorf("server holds 1: %t, 2: %t; ledger %+v", b.see.Held(1), b.see.Held(2), s)
		}
	})
	t.Run("create table as execute", func(t *testing.T) {
		b := setUp(t)
		conn := mustConn(t, b.db)
		st, err := conn.PrepareContext(ctxFor(t), "CREATE TEMP TABLE t AS EXECUTE p")
		must(t, err)
		mustExec(t, conn, "PREPARE p AS SELECT pg_advisory_lock(42)::text")
		_, err = st.ExecContext(ctxFor(t))
		must(t, err)
		st.Close()
		must(t, conn.Close())
		if b.see.Held(42) {
			t.Errorf("held in the pool; idle %d", b.db.Stats().Idle)
		}
	})
}

// F: events for correct programs: isolation.
func TestRegressionIsolation(t *testing.T) {
	for name, run := range map[string]func(*testing.T, *sql.Conn){
		"RESET": func(t *testing.T, c *sql.Conn) {
			mustExec(t, c, "SET default_transaction_isolation = 'repeatable read'")
			mustExec(t, c, "RESET default_transaction_isolation")
			tx := mustTx(t, c, nil)
			mustExec(t, tx, "SELECT pg_advisory_xact_lock(42)")
			must(t, tx.Commit())
		},
		"rolled back SET": func(t *testing.T, c *sql.Conn) {
			tx := mustTx(t, c, nil)
			mustExec(t, tx, "SET default_transaction_isolation = 'repeatable read'")
			must(t, tx.Rollback())
			tx = mustTx(t, c, nil)
			mustExec(t, tx, "SELECT pg_advisory_xact_lock(42)")
			must(t, tx.Commit())
		},
		"BEGIN behind a comment": func(t *testing.T, c *sql.Conn) {
			tx := mustTx(t, c, &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
			must(t, tx.Commit())
			mustExec(t, c, "/* app */ BEGIN")
			mustExec(t, c, "SELECT pg_advisory_xact_lock(42)")
			mustExec(t, c, "COMMIT")
		},
		"BEGIN through Raw": func(t *testing.T, c *sql.Conn) {
			tx := mustTx(t, c, &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
			must(t, tx.Commit())
			raw(t, c, func(p *pgx.Conn) error { _, err := p.Exec(ctxFor(t), "BEGIN"); return err })
			mustExec(t, c, "SELECT pg_advisory_xact_lock(42)")
			mustExec(t, c, "COMMIT")
		},
		"DISCARD ALL": func(t *testing.T, c *sql.Conn) {
			mustExec(t, c, "SET default_transaction_isolation = 'repeatable read'")
			mustExec(t, c, "DISCARD ALL")
			tx := mustTx(t, c, nil)
			mustExec(t, tx, "SELECT pg_advisory_xact_lock(42)")
			must(t, tx.Commit())
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := setUp(t)
			c := mustConn(t, b.db)
			defer c.Close()
			run(t, c)
			noEvents(t, b.rec)
		})
	}
	t.Run("reset=discard_all", func(t *testing.T) {
		b := setUp(t, pgadvlock.WithReset(pgadvlock.ResetDiscardAll), pgadvlock.WithRule(pgadvlock.RuleLeakedSessionLock, pgadvlock.LevelOff))
		b.db.SetMaxOpenConns(1)
		c := mustConn(t, b.db)
		mustExec(t, c, "SET default_transaction_isolation = 'repeatable read'")
		mustExec(t, c, "SELECT pg_advisory_lock(1)")
		must(t, c.Close())
		tx, err := b.db.BeginTx(ctxFor(t), nil)
		must(t, err)
		var iso string
		must(t, tx.QueryRow("SHOW transaction_isolation").Scan(&iso))
		mustExec(t, tx, "SELECT pg_advisory_xact_lock(42)")
		must(t, tx.Commit())
		t.Log(iso)
		noEvents(t, b.rec)
	})
}

// G: hold spans.
func TestRegressionHoldSpans(t *testing.T) {
	for name, run := range map[string]func(*testing.T, bench, *sql.Conn){
		"lock and try in one": func(t *testing.T, _ bench, c *sql.Conn) {
			mustExec(t, c, "SELECT pg_advisory_lock(1), pg_try_advisory_lock(1)")
			mustExec(t, c, "SELECT pg_advisory_unlock(1), pg_advisory_unlock(1)")
		},
		"key not known": func(t *testing.T, _ bench, c *sql.Conn) {
			mustExec(t, c, "SELECT pg_advisory_lock(hashtext($1))", []byte("refunds"))
			mustExec(t, c, "SELECT pg_advisory_unlock_all()")
		},
		"terminated in BEGIN": func(t *testing.T, b bench, c *sql.Conn) {
			pid := backendPID(t, c)
			mustExec(t, c, "BEGIN")
			mustExec(t, c, "SELECT pg_advisory_xact_lock(1)")
			b.see.Exec("SELECT pg_terminate_backend($1, 5000)", pid)
			_, _ = c.ExecContext(ctxFor(t), "SELECT 1")
		},
	} {
		t.Run(name, func(t *testing.T) {
			tr := &regressionTracer{}
			b := setUp(t, pgadvlock.WithTracerProvider(regressionProvider{t: tr}))
			c := mustConn(t, b.db)
			run(t, b, c)
			c.Close()
			b.db.Close()
			tr.check(t)
		})
	}
	t.Run("observe, BEGIN left open", func(t *testing.T) {
		tr := &regressionTracer{}
		b := setUp(t, pgadvlock.WithTracerProvider(regressionProvider{t: tr}), pgadvlock.WithPreset(pgadvlock.PresetObserve))
		c := mustConn(t, b.db)
		mustExec(t, c, "BEGIN")
		mustExec(t, c, "SELECT pg_advisory_xact_lock(1)")
		c.Close()
		b.db.Close()
		tr.check(t)
	})
}

// H: a retry in a savepoint after a lock that was granted with an error.
func TestRegressionGrantedTwice(t *testing.T) {
	server := pgtest.Shared(t)
	dsn := server.DSN(server.NewDB(t))
	cfg, err := pgx.ParseConfig(dsn)
	must(t, err)
	for _, twice := range []bool{false, true} {
		fails := 1
		if twice {
			fails = 2
		}
		base := regressionConnector{stdlib.GetConnector(*cfg), func(ctx context.Context, q string, c *pgx.Conn) error {
			if q == "SELECT pg_advisory_lock(42)" && fails > 0 {
				fails--
				_, _ = c.Exec(ctx, "SELECT 1/0") // as a cancel does: the transaction has failed
				return &pgconn.PgError{Severity: "ERROR", Code: "57014", Message: "canceling statement due to user request"}
			}
			return nil
		}}
		rec := &recorder{}
		con, err := pgadvlock.WrapConnector(base, pgadvlock.WithEventHandler(rec.handle), pgadvlock.WithLogger(quiet()))
		must(t, err)
		db := sql.OpenDB(con)
		t.Cleanup(func() { db.Close() })
		see := pgtest.Observe(t, dsn)
		conn := mustConn(t, db)
		tx := mustTx(t, conn, nil)
		mustExec(t, tx, "SAVEPOINT s")
		for range 2 {
			if _, err := tx.ExecContext(ctxFor(t), "SELECT pg_advisory_lock(42)"); err != nil {
				mustExec(t, tx, "ROLLBACK TO s")
			}
		}
		must(t, tx.Commit())
		t.Logf("sessions %+v", con.Sessions())
		if !twice {
			mustExec(t, conn, "SELECT pg_advisory_unlock(42)")
		}
		must(t, conn.Close())
		if see.Held(42) {
			t.Errorf("twice=%t: held in the pool; idle %d; events %v", twice, db.Stats().Idle, rec.all())
		}
		db.Close()
		see.WaitFor(time.Second, "free", func(l []pgtest.Lock) bool { return len(l) == 0 })
	}
}

type cancelTracer struct{ cancel func() }

func (c *cancelTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	return context.WithValue(ctx, c, d.SQL)
}
func (c *cancelTracer) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryEndData) {
	if s, _ := ctx.Value(c).(string); strings.Contains(s, "advisory") && c.cancel != nil {
		c.cancel()
	}
}

// I: a context that ends between the grant and the COMMIT of max_wait.
func TestRegressionMaxWaitCancel(t *testing.T) {
	for _, maxWait := range []time.Duration{0, 10 * time.Second} {
		for _, q := range []string{"SELECT pg_advisory_lock(42)", "SELECT pg_advisory_xact_lock(42)"} {
			t.Run(maxWait.String()+" "+q, func(t *testing.T) {
				server := pgtest.Shared(t)
				cfg, err := pgx.ParseConfig(server.DSN(server.NewDB(t)))
				must(t, err)
				tr := &cancelTracer{}
				cfg.Tracer = tr
				dsn := stdlib.RegisterConnConfig(cfg)
				defer stdlib.UnregisterConnConfig(dsn)
				rec := &recorder{}
				db := openDB(t, dsn, rec, pgadvlock.WithMaxWait(maxWait), pgadvlock.WithRule(pgadvlock.RuleXactLockAutocommit, pgadvlock.LevelOff))
				see := pgtest.Observe(t, cfg.ConnString())
				see.Exec("CREATE TABLE work (i int)")
				conn := mustConn(t, db)
				mustExec(t, conn, "SELECT 1")
				ctx, cancel := context.WithCancel(ctxFor(t))
				defer cancel()
				tr.cancel = cancel
				_, err = conn.ExecContext(ctx, q)
				tr.cancel = nil
				t.Logf("lock: %v", err)
				_, err = conn.ExecContext(ctxFor(t), "INSERT INTO work VALUES (1)")
				t.Logf("insert: %v", err)
				conn.Close()
				var n int
				must(t, see.Conn().QueryRow(ctxFor(t), "SELECT count(*) FROM work").Scan(&n))
				if err == nil && n != 1 {
					t.Errorf("an autocommit INSERT that succeeded is gone: %d rows", n)
				}
			})
		}
	}
	t.Run("in a transaction", func(t *testing.T) {
		server := pgtest.Shared(t)
		cfg, err := pgx.ParseConfig(server.DSN(server.NewDB(t)))
		must(t, err)
		tr := &cancelTracer{}
		cfg.Tracer = tr
		dsn := stdlib.RegisterConnConfig(cfg)
		defer stdlib.UnregisterConnConfig(dsn)
		db := openDB(t, dsn, &recorder{}, pgadvlock.WithMaxWait(10*time.Second))
		tx, err := db.BeginTx(ctxFor(t), nil)
		must(t, err)
		defer tx.Rollback()
		ctx, cancel := context.WithCancel(ctxFor(t))
		defer cancel()
		tr.cancel = cancel
		_, err = tx.ExecContext(ctx, "SELECT pg_advisory_xact_lock(42)")
		tr.cancel = nil
		var lt string
		must(t, tx.QueryRow("SHOW lock_timeout").Scan(&lt))
		t.Logf("lock: %v", err)
		if lt != "0" {
			t.Errorf("lock_timeout is %s", lt)
		}
	})
}

type panicValuer struct{}

func (panicValuer) Value() (driver.Value, error) { panic("mine") }

// J: a panicking Valuer.
func TestRegressionPanickingValuer(t *testing.T) {
	b := setUp(t, pgadvlock.WithWaitWarning(300*time.Millisecond), pgadvlock.WithMaxWait(5*time.Second))
	conn := mustConn(t, b.db)
	func() {
		defer func() { t.Log("recovered:", recover()) }()
		_, _ = conn.ExecContext(ctxFor(t), "SELECT pg_advisory_lock($1)", panicValuer{})
	}()
	time.Sleep(time.Second)
	c, _ := pgadvlock.ConnectorOf(b.db)
	t.Logf("sessions %+v", c.Sessions())
	noEvents(t, b.rec)
	done := make(chan struct{})
	go func() { conn.Close(); close(done) }()
	select {
	case <-done:
	case <-time.After(5 * time.Second):
		t.Error("Close hangs")
	}
}

type countReg struct {
	mnoop.Registration
	n *int
}

func (c countReg) Unregister() error { *c.n--; return nil }

type countMeter struct {
	mnoop.Meter
	n *int
}

func (m countMeter) RegisterCallback(metric.Callback, ...metric.Observable) (metric.Registration, error) {
	*m.n++
	return countReg{n: m.n}, nil
}

type countMP struct {
	mnoop.MeterProvider
	n *int
}

func (p countMP) Meter(string, ...metric.MeterOption) metric.Meter { return countMeter{n: p.n} }

// K: driver.Open leaves its Connector registered.
func TestRegressionDriverOpen(t *testing.T) {
	n := 0
	b := setUp(t, pgadvlock.WithMeterProvider(countMP{n: &n}))
	before := n
	for range 3 {
		c, err := b.db.Driver().Open(b.dsn)
		must(t, err)
		must(t, c.Close())
	}
	if n != before {
		t.Errorf("%d callbacks left", n-before)
	}
}

func TestRegressionStatementPooling(t *testing.T) {
	server := pgtest.Shared(t)
	server.RequireBouncer(t)
	db := openDB(t, server.BouncerDSN(server.NewDB(t), "statement"), &recorder{}, pgadvlock.WithMaxWait(5*time.Second))
	_, err := db.ExecContext(ctxFor(t), "SELECT pg_advisory_xact_lock(42)", pgx.QueryExecModeSimpleProtocol)
	if err != nil {
		t.Error(err)
	}
}

// N: orders.
func TestRegressionOrderAfterRawCommit(t *testing.T) {
	b := setUp(t)
	conn := mustConn(t, b.db)
	defer conn.Close()
	cm, err := conn.PrepareContext(ctxFor(t), "COMMIT")
	must(t, err)
	for _, k := range []int{1, 2, 1} {
		mustExec(t, conn, "BEGIN")
		mustExec(t, conn, "SELECT pg_advisory_xact_lock($1)", k)
		_, err = cm.ExecContext(ctxFor(t))
		must(t, err)
	}
	cm.Close()
	noEvents(t, b.rec)
}

// O: a shared first question that fails by timeouts inside a transaction.
func TestRegressionErrBadConnRetry(t *testing.T) {
	_ = errors.Is
}

// P: session lock in a transaction with max_wait, context over before the restore.
func TestRegressionMaxWaitLeak(t *testing.T) {
	server := pgtest.Shared(t)
	cfg, err := pgx.ParseConfig(server.DSN(server.NewDB(t)))
	must(t, err)
	tr := &cancelTracer{}
	cfg.Tracer = tr
	dsn := stdlib.RegisterConnConfig(cfg)
	defer stdlib.UnregisterConnConfig(dsn)
	rec := &recorder{}
	db := openDB(t, dsn, rec, pgadvlock.WithMaxWait(10*time.Second))
	see := pgtest.Observe(t, cfg.ConnString())
	tx, err := db.BeginTx(ctxFor(t), nil)
	must(t, err)
	ctx, cancel := context.WithCancel(ctxFor(t))
	defer cancel()
	tr.cancel = cancel
	_, err = tx.ExecContext(ctx, "SELECT pg_advisory_lock(42)")
	tr.cancel = nil
	t.Logf("lock: %v", err)
	must(t, tx.Commit())
	if see.Held(42) {
		t.Errorf("held in the pool; idle %d; events %v", db.Stats().Idle, rec.all())
	}
}

// Q: a statement's context that is over in a transaction, before the first lock.
func TestRegressionUnprovenInTx(t *testing.T) {
	b := setUp(t)
	tx, err := b.db.BeginTx(ctxFor(t), nil)
	must(t, err)
	defer tx.Rollback()
	ctx, cancel := context.WithCancel(ctxFor(t))
	cancel()
	_, err = tx.ExecContext(ctx, "SELECT pg_advisory_lock(42)")
	t.Logf("first: %v", err)
	_, err = tx.ExecContext(ctxFor(t), "SELECT pg_advisory_lock(42)")
	t.Logf("then: %v", err)
	_, err = tx.ExecContext(ctxFor(t), "SELECT pg_advisory_unlock(42)")
	t.Logf("unlock: %v", err)
	noEvents(t, b.rec)
}

// R: prepared SAVEPOINT.
func TestRegressionPreparedSavepoint(t *testing.T) {
	b := setUp(t)
	conn := mustConn(t, b.db)
	defer conn.Close()
	sp, err := conn.PrepareContext(ctxFor(t), "SAVEPOINT s")
	must(t, err)
	defer sp.Close()
	mustExec(t, conn, "BEGIN")
	mustExec(t, conn, "SELECT pg_advisory_xact_lock(1)")
	_, err = sp.ExecContext(ctxFor(t))
	must(t, err)
	mustExec(t, conn, "SELECT pg_advisory_xact_lock(2)")
	mustExec(t, conn, "ROLLBACK TO s")
	c, _ := pgadvlock.ConnectorOf(b.db)
	if s := c.Sessions(); len(s) != 1 || len(s[0].Held) != 1 {
		t.Errorf("server holds 1: %t, 2: %t; ledger %+v", b.see.Held(1), b.see.Held(2), s)
	}
	mustExec(t, conn, "COMMIT")
}

// S: prepared COMMIT and the order of waits.
func TestRegressionPreparedCommitOrder(t *testing.T) {
	b := setUp(t)
	for _, keys := range [][]int{{1, 2}, {2, 1}} {
		conn := mustConn(t, b.db)
		cm, err := conn.PrepareContext(ctxFor(t), "COMMIT")
		must(t, err)
		for _, k := range keys {
			mustExec(t, conn, "BEGIN")
			mustExec(t, conn, "SELECT pg_advisory_xact_lock($1)", k)
			_, err = cm.ExecContext(ctxFor(t))
			must(t, err)
		}
		cm.Close()
		must(t, conn.Close())
	}
	noEvents(t, b.rec)
}

// S2: the same with COMMIT through Raw.
func TestRegressionRawCommitOrder(t *testing.T) {
	b := setUp(t)
	for _, keys := range [][]int{{1, 2}, {2, 1}} {
		conn := mustConn(t, b.db)
		for _, k := range keys {
			mustExec(t, conn, "BEGIN")
			mustExec(t, conn, "SELECT pg_advisory_xact_lock($1)", k)
			raw(t, conn, func(c *pgx.Conn) error { _, err := c.Exec(ctxFor(t), "COMMIT"); return err })
		}
		must(t, conn.Close())
	}
	noEvents(t, b.rec)
}

type deadConn struct {
	net.Conn
	dead *atomic.Bool
}

func (d deadConn) Write(p []byte) (int, error) {
	if d.dead.Load() {
		d.Conn.Close()
		return 0, errors.New("broken pipe")
	}
	return d.Conn.Write(p)
}

// T: a connection in the pool whose socket is broken: database/sql retries.
func TestRegressionBrokenInPool(t *testing.T) {
	for _, mw := range []time.Duration{-1, 0, 10 * time.Second} {
		server := pgtest.Shared(t)
		cfg, err := pgx.ParseConfig(server.DSN(server.NewDB(t)))
		must(t, err)
		var mu sync.Mutex
		var last *atomic.Bool
		cfg.DialFunc = func(ctx context.Context, n, a string) (net.Conn, error) {
			c, err := (&net.Dialer{}).DialContext(ctx, n, a)
			if err != nil {
				return nil, err
			}
			mu.Lock()
			defer mu.Unlock()
			last = &atomic.Bool{}
			return deadConn{c, last}, nil
		}
		dsn := stdlib.RegisterConnConfig(cfg)
		defer stdlib.UnregisterConnConfig(dsn)
		var db *sql.DB
		if mw < 0 {
			db, err = sql.Open("pgx", dsn)
			must(t, err)
			defer db.Close()
		} else {
			db = openDB(t, dsn, &recorder{}, pgadvlock.WithMaxWait(mw))
		}
		mustExec(t, db, "SELECT 1")
		mustExec(t, db, "SELECT 1")
		last.Store(true)
		_, err = db.ExecContext(ctxFor(t), "SELECT pg_advisory_xact_lock(42)")
		t.Logf("max_wait %v (-1: plain): %v", mw, err)
		if err != nil && mw > 0 {
			t.Error("not retried")
		}
	}
}

func TestRegressionRace(t *testing.T) {
	tr := &regressionTracer{}
	b := setUp(t, pgadvlock.WithTracerProvider(regressionProvider{t: tr}), pgadvlock.WithBlockerAfter(time.Millisecond), pgadvlock.WithWaitWarning(2*time.Millisecond), pgadvlock.WithMaxWait(20*time.Millisecond))
	c, _ := pgadvlock.ConnectorOf(b.db)
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Go(func() {
			for j := range 15 {
				conn, err := b.db.Conn(context.Background())
				if err != nil {
					t.Error(err)
					return
				}
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(5+i*3)*time.Millisecond)
				_, _ = conn.ExecContext(ctx, "SELECT pg_advisory_lock($1)", int64(j%2))
				time.Sleep(3 * time.Millisecond)
				c.Sessions()
				if j%3 > 0 {
					_, _ = conn.ExecContext(context.Background(), "SELECT pg_advisory_unlock($1)", int64(j%2))
				}
				cancel()
				conn.Close()
			}
		})
	}
	wg.Wait()
	b.see.WaitFor(3*time.Second, "nothing is held", func(l []pgtest.Lock) bool { return len(l) == 0 })
	b.db.Close()
	tr.check(t)
	if s := c.Sessions(); len(s) > 0 {
		t.Errorf("%+v", s)
	}
}

// W: panic leaves a transaction open with max_wait.
func TestRegressionPanicOpenTx(t *testing.T) {
	b := setUp(t, pgadvlock.WithMaxWait(5*time.Second))
	b.see.Exec("CREATE TABLE work (i int)")
	conn := mustConn(t, b.db)
	func() {
		defer func() { _ = recover() }()
		_, _ = conn.ExecContext(ctxFor(t), "SELECT pg_advisory_lock($1)", panicValuer{})
	}()
	_, err := conn.ExecContext(ctxFor(t), "INSERT INTO work VALUES (1)")
	conn.Close()
	var n int
	must(t, b.see.Conn().QueryRow(ctxFor(t), "SELECT count(*) FROM work").Scan(&n))
	if err == nil && n != 1 {
		t.Errorf("lost: %d", n)
	}
}

// X: the prepared statements of a wrong-mode lock, discard_all in every exec mode.
func TestRegressionDiscardModes(t *testing.T) {
	for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"} {
		server := pgtest.Shared(t)
		dsn := server.DSN(server.NewDB(t))
		cfg, err := pgx.ParseConfig(dsn)
		must(t, err)
		cfg.DefaultQueryExecMode = map[string]pgx.QueryExecMode{"cache_statement": pgx.QueryExecModeCacheStatement, "cache_describe": pgx.QueryExecModeCacheDescribe,
			"describe_exec": pgx.QueryExecModeDescribeExec, "exec": pgx.QueryExecModeExec, "simple_protocol": pgx.QueryExecModeSimpleProtocol}[mode]
		name := stdlib.RegisterConnConfig(cfg)
		db := openDB(t, name, &recorder{}, pgadvlock.WithReset(pgadvlock.ResetDiscardAll))
		db.SetMaxOpenConns(1)
		st, err := db.PrepareContext(ctxFor(t), "SELECT $1::int + 1")
		must(t, err)
		lst, err := db.PrepareContext(ctxFor(t), "SELECT pg_advisory_lock($1)")
		must(t, err)
		for range 3 {
			var n int
			must(t, st.QueryRow(1).Scan(&n))
			must(t, db.QueryRow("SELECT $1::int + 2", 1).Scan(&n))
			_, err = lst.Exec(42)
			must(t, err)
		}
		must(t, st.Close())
		st, err = db.PrepareContext(ctxFor(t), "SELECT $1::int + 1")
		must(t, err)
		var n int
		must(t, st.QueryRow(1).Scan(&n))
		must(t, st.Close())
		must(t, lst.Close())
		stdlib.UnregisterConnConfig(name)
	}
}

func TestRegressionPreparedCommit(t *testing.T) {
	b := setUp(t)
	var conns []*sql.Conn
	for range 2 {
		conns = append(conns, mustConn(t, b.db))
	}
	var cms []*sql.Stmt
	for _, c := range conns {
		cm, err := c.PrepareContext(ctxFor(t), "COMMIT")
		must(t, err)
		cms = append(cms, cm)
	}
	for i, keys := range [][]int{{1, 2}, {2, 1}} {
		for _, k := range keys {
			mustExec(t, conns[i], "BEGIN")
			mustExec(t, conns[i], "SELECT pg_advisory_xact_lock($1)", k)
			_, err := cms[i].ExecContext(ctxFor(t))
			must(t, err)
		}
	}
	for i := range conns {
		cms[i].Close()
		must(t, conns[i].Close())
	}
	noEvents(t, b.rec)
	c, _ := pgadvlock.ConnectorOf(b.db)
	if s := c.Sessions(); len(s) > 0 {
		t.Errorf("idle in the pool, server holds %v, ledger %+v", b.see.Locks(), s)
	}
}

func TestRegressionSimpleOnly(t *testing.T) {
	server := pgtest.Private(t, "wal_level=replica", "max_wal_senders=4")
	for _, drv := range []string{"pgx", "pgadvlock"} {
		cfg, err := pgx.ParseConfig(server.DSN(server.NewDB(t)))
		must(t, err)
		cfg.RuntimeParams["replication"] = "database"
		cfg.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
		name := stdlib.RegisterConnConfig(cfg)
		db, err := sql.Open(drv, name)
		must(t, err)
		t.Cleanup(func() { db.Close() })
		conn, err := db.Conn(ctxFor(t))
		if err != nil {
			t.Error(err)
		} else {
			_, err = conn.ExecContext(ctxFor(t), "SELECT pg_advisory_lock(42)")
			_, err2 := conn.ExecContext(ctxFor(t), "SELECT pg_advisory_unlock(42)")
			t.Logf("%s: lock %v, unlock %v", drv, err, err2)
			if err2 != nil {
				t.Error(err2)
			}
			conn.Close()
		}
		db.Close()
	}
}

// A shadowing overload: counted as the real function?
func TestRegressionShadow(t *testing.T) {
	b := setUp(t)
	b.see.Exec("CREATE FUNCTION public.pg_advisory_lock(int) RETURNS void LANGUAGE sql AS 'SELECT pg_catalog.pg_advisory_lock(1), pg_catalog.pg_advisory_lock(2)'")
	conn := mustConn(t, b.db)
	mustExec(t, conn, "SELECT pg_advisory_lock(42)")
	t.Log(b.see.Locks())
	mustExec(t, conn, "SELECT pg_advisory_unlock(1)")
	must(t, conn.Close())
	if l := b.see.Locks(); len(l) > 0 {
		t.Error(l)
	}
}

// The context over in a transaction before the first lock, where the first question is asked.
func TestRegressionPoolModeInTx(t *testing.T) {
	b := setUp(t)
	conn := mustConn(t, b.db)
	defer conn.Close()
	// A server error while asking: statement_timeout hits the question by a late cancel, simulated by a failing GUC.
	mustExec(t, conn, "SET statement_timeout = '1ms'")
	_, err := conn.ExecContext(ctxFor(t), "SELECT pg_advisory_lock(42)")
	t.Log(err)
	noEvents(t, b.rec)
}

// max_wait, xact lock through PgBouncer in statement mode.
func TestRegressionStatement(t *testing.T) {
	server := pgtest.Shared(t)
	server.RequireBouncer(t)
	for _, max := range []string{"0", "5s"} {
		dsn := server.BouncerDSN(server.NewDB(t), "statement")
		dsn += map[bool]string{true: "&", false: "?"}[strings.Contains(dsn, "?")] + "pgadvlock_max_wait=" + max
		db := openDB(t, dsn, &recorder{})
		_, err := db.ExecContext(ctxFor(t), "SELECT pg_advisory_xact_lock(42)")
		t.Logf("%s: %v", max, err)
	}
}
