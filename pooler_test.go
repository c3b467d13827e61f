package pgadvlock_test

// The road: what is refused behind PgBouncer, what works, and that nothing but
// the statement's own fate changes.

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgadvlock/pgadvlock"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

// simple is the exec mode that works behind transaction pooling.
const simple = "&default_query_exec_mode=exec"

// behind opens a pool through the shared PgBouncer.
func behind(t *testing.T, mode string, opts ...pgadvlock.Option) bench {
	t.Helper()
	server := pgtest.Shared(t)
	server.RequireBouncer(t)
	name := server.NewDB(t)
	b := bench{dsn: server.BouncerDSN(name, mode) + simple, rec: &recorder{}, see: pgtest.Observe(t, server.DSN(name))}
	b.db = openDB(t, b.dsn, b.rec, opts...)
	return b
}

// sessionLevel are statements with a session-level function, in every way that
// database/sql has to send one.
var sessionLevel = map[string]func(*testing.T, *sql.Conn) error{
	"Exec":          execConn("SELECT pg_advisory_lock(42)"),
	"Exec with arg": execConn("SELECT pg_advisory_lock($1)", 42),
	"share":         execConn("SELECT pg_advisory_lock_shared(4, 2)"),
	"try":           execConn("SELECT pg_try_advisory_lock(42)"),
	"unlock":        execConn("SELECT pg_advisory_unlock(42)"),
	"unlock all":    execConn("SELECT pg_advisory_unlock_all()"),
	"CTE":           execConn("WITH l AS MATERIALIZED (SELECT pg_advisory_lock(42)) SELECT * FROM l"),
	"DO":            execConn("DO $$ BEGIN PERFORM pg_advisory_lock(42); END $$"),
	"two in a text": execConn("SELECT 1; SELECT pg_advisory_lock(42)"),
	"PREPARE":       execConn("PREPARE p AS SELECT pg_advisory_lock(42)"),
	"Query": func(t *testing.T, c *sql.Conn) error {
		rows, err := c.QueryContext(ctxFor(t), "SELECT pg_advisory_lock(42)")
		if err == nil {
			rows.Close()
		}
		return err
	},
	"QueryRow": func(t *testing.T, c *sql.Conn) error {
		return c.QueryRowContext(ctxFor(t), "SELECT pg_try_advisory_lock(42)").Scan(new(bool))
	},
	"Prepare": func(t *testing.T, c *sql.Conn) error {
		stmt, err := c.PrepareContext(ctxFor(t), "SELECT pg_advisory_lock($1)")
		if err == nil {
			stmt.Close()
		}
		return err
	},
	"in a transaction": func(t *testing.T, c *sql.Conn) error {
		tx, err := c.BeginTx(ctxFor(t), nil)
		must(t, err)
		defer tx.Rollback()
		_, err = tx.ExecContext(ctxFor(t), "SELECT pg_advisory_lock(42)")
		return err
	},
}

func execConn(query string, args ...any) func(*testing.T, *sql.Conn) error {
	return func(t *testing.T, c *sql.Conn) error {
		_, err := c.ExecContext(ctxFor(t), query, args...)
		return err
	}
}

func TestSessionLevelStatementsAreRefusedBehindTransactionPooling(t *testing.T) {
	server := pgtest.Private(t, "log_statement=all")
	server.RequireBouncer(t)
	for _, mode := range []string{"transaction", "statement"} {
		for name, run := range sessionLevel {
			if mode == "statement" && name == "in a transaction" {
				continue // PgBouncer itself refuses BEGIN there
			}
			t.Run(mode+" "+name, func(t *testing.T) {
				rec := &recorder{}
				db := openDB(t, server.BouncerDSN(server.NewDB(t), mode)+simple, rec)
				conn := mustConn(t, db)
				defer conn.Close()
				mark := server.LogMark()
				err := run(t, conn)
				var e *pgadvlock.RuleError
				if !errors.Is(err, pgadvlock.RuleTransactionPooling) || !errors.As(err, &e) {
					t.Fatalf("error %v", err)
				}
				for _, want := range []string{"pool mode " + mode, "pooler_test.go:", "pg_advisory_xact_lock", "pgadvlock_pool_mode=session", "docs/rules.md#transaction-pooling"} {
					if !strings.Contains(err.Error(), want) {
						t.Errorf("%q is missing in: %v", want, err)
					}
				}
				if len(rec.of(pgadvlock.RuleTransactionPooling)) != 1 {
					t.Errorf("events %v", rec.all())
				}
				if log := server.LogFrom(mark); strings.Contains(log, "advisory") {
					t.Errorf("it reached the server:\n%s", log)
				}
			})
		}
	}
}

func TestTransactionLocksPassBehindTransactionPooling(t *testing.T) {
	b := behind(t, "transaction")
	tx, err := b.db.BeginTx(ctxFor(t), nil)
	must(t, err)
	mustExec(t, tx, "SELECT pg_advisory_xact_lock($1)", 42)
	if !b.see.Held(42) {
		t.Error("not held")
	}
	must(t, tx.Commit())
	if len(b.see.Locks()) > 0 || len(b.rec.all()) > 0 {
		t.Errorf("locks %v, events %v", b.see.Locks(), b.rec.all())
	}
}

// In session mode everything works, and what leaks is released even where
// PgBouncer itself would not: locks outlive the client with an empty
// server_reset_query.
func TestSessionPooling(t *testing.T) {
	server := pgtest.Shared(t)
	bouncer := server.Bouncer(t, "server_reset_query=")
	name := server.NewDB(t)
	see, rec := pgtest.Observe(t, server.DSN(name)), &recorder{}
	db := openDB(t, bouncer.DSN(name, "session")+simple, rec)
	conn := mustConn(t, db)
	for _, s := range []string{"SELECT pg_advisory_lock(42)", "SELECT pg_advisory_unlock(42)", "SELECT pg_advisory_lock(43)"} {
		mustExec(t, conn, s)
	}
	if !see.Held(43) {
		t.Error("not held")
	}
	must(t, conn.Close())
	e := rec.all()
	if len(see.Locks()) > 0 || db.Stats().Idle != 1 || len(e) != 1 || e[0].PoolMode != pgadvlock.PoolSession || e[0].Err != nil {
		t.Errorf("locks %v, events %+v, stats %+v", see.Locks(), e, db.Stats())
	}
}

// A mode that cannot be proved is a warning, and a reason to close.
func TestUnknownPooling(t *testing.T) {
	server := pgtest.Shared(t)
	bouncer := server.Bouncer(t, "default_pool_size=1")
	name := server.NewDB(t)
	rec := &recorder{}
	// The only backend of the pool is the connection's own: the probe finds
	// no second one.
	db := openDB(t, bouncer.DSN(name, "session")+simple, rec)
	conn := mustConn(t, db)
	mustExec(t, conn, "SELECT 1")
	start := time.Now()
	mustExec(t, conn, "SELECT pg_advisory_lock(42)")
	if d := time.Since(start); d > 2*time.Second {
		t.Errorf("the lock took %s", d)
	}
	if e := rec.all(); len(e) != 1 || e[0].Rule != pgadvlock.RuleUnprovenPooling || e[0].PoolMode != pgadvlock.PoolUnknown || e[0].Err == nil {
		t.Errorf("events %+v", e)
	}
	must(t, conn.Close())
	if e := rec.of(pgadvlock.RuleLeakedSessionLock); len(e) != 1 || e[0].Err == nil || db.Stats().Idle != 0 {
		t.Errorf("events %+v, stats %+v", e, db.Stats())
	}
	pgtest.Observe(t, server.DSN(name)).WaitFor(time.Second, "nothing is held", func(l []pgtest.Lock) bool { return len(l) == 0 })
}

// Nothing is sent to a backend that may be somebody else's, whatever was done
// with the connection.
func TestDirtyConnectionBehindTransactionPoolingIsLeftAlone(t *testing.T) {
	server := pgtest.Private(t, "log_statement=all")
	server.RequireBouncer(t)
	for name, leave := range map[string]func(*testing.T, *sql.Conn){
		"raw":            func(t *testing.T, c *sql.Conn) { raw(t, c, func(*pgx.Conn) error { return nil }) },
		"rule at warn":   func(t *testing.T, c *sql.Conn) { mustExec(t, c, "SELECT pg_advisory_lock(42)") },
		"DO at warn":     func(t *testing.T, c *sql.Conn) { mustExec(t, c, "DO $$ BEGIN PERFORM pg_advisory_lock(42); END $$") },
		"nothing at all": func(*testing.T, *sql.Conn) {},
	} {
		for _, when := range []pgadvlock.ResetWhen{pgadvlock.ResetDirty, pgadvlock.ResetAlways} {
			t.Run(fmt.Sprint(name, " ", when), func(t *testing.T) {
				db := openDB(t, server.BouncerDSN(server.NewDB(t), "transaction")+simple, &recorder{},
					pgadvlock.WithRule(pgadvlock.RuleTransactionPooling, pgadvlock.LevelWarn), pgadvlock.WithResetWhen(when))
				conn := mustConn(t, db)
				leave(t, conn)
				mark := server.LogMark()
				must(t, conn.Close())
				if log := server.LogFrom(mark); strings.Contains(log, "unlock_all") || strings.Contains(log, "DISCARD") {
					t.Errorf("a release was sent:\n%s", log)
				}
			})
		}
	}
}

func TestPoolModeTellsItsEvidence(t *testing.T) {
	server := pgtest.Shared(t)
	server.RequireBouncer(t)
	name := server.NewDB(t)
	for dsn, want := range map[string]pgadvlock.PoolMode{
		server.DSN(name):                                                    pgadvlock.PoolDirect,
		server.SocketDSN(name):                                              pgadvlock.PoolDirect,
		server.BouncerDSN(name, "session") + simple:                         pgadvlock.PoolSession,
		server.BouncerDSN(name, "transaction") + simple:                     pgadvlock.PoolTransaction,
		server.BouncerDSN(name, "statement") + simple:                       pgadvlock.PoolStatement,
		server.DSN(name) + "&pgadvlock_pool_mode=session":                   pgadvlock.PoolSession,
		server.BouncerDSN(name, "session") + "&pgadvlock_pool_mode=unknown": pgadvlock.PoolUnknown,
	} {
		db := openDB(t, dsn, &recorder{})
		conn := mustConn(t, db)
		must(t, conn.Raw(func(c any) error {
			mode, evidence, err := c.(*pgadvlock.Conn).PoolMode(ctxFor(t))
			if mode != want || err != nil || evidence == "" {
				t.Errorf("%s: %v, %q, %v; want %v", dsn, mode, evidence, err, want)
			}
			return nil
		}))
		must(t, conn.Close())
	}
}

// fresh are how many pools of each kind a verdict is asked of, and how many
// clients keep the busy ones busy: PGADVLOCK_TEST_PROBES and 20, or what a machine
// that runs other tests at the same time answers within the probe's budget.
func fresh() (pools, clients int) {
	if n, err := strconv.Atoi(os.Getenv("PGADVLOCK_TEST_PROBES")); err == nil {
		return n, 20
	}
	return 20, 5
}

// Every first lock of a fresh pool is refused behind transaction and statement
// pooling, and none elsewhere.
func TestFreshPools(t *testing.T) {
	server := pgtest.Shared(t)
	server.RequireBouncer(t)
	name := server.NewDB(t)
	kinds := []struct {
		name    string
		dsn     string
		busy    int // clients of the same pool
		inTx    bool
		refused bool
	}{
		{name: "direct", dsn: server.DSN(name)},
		{name: "session", dsn: server.Bouncer(t, "default_pool_size=20").DSN(name, "session")},
		{name: "statement", dsn: server.BouncerDSN(name, "statement"), refused: true},
	}
	pools, clients := fresh()
	for _, size := range []int{1, 2, 20} {
		dsn := server.Bouncer(t, fmt.Sprint("default_pool_size=", size)).DSN(name, "transaction")
		for _, busy := range []int{0, clients} {
			for _, inTx := range []bool{false, true} {
				if inTx && size == 1 {
					continue // the transaction holds the only backend: see below
				}
				kinds = append(kinds, struct {
					name    string
					dsn     string
					busy    int
					inTx    bool
					refused bool
				}{fmt.Sprintf("transaction, pool_size %d, %d busy, in a transaction %t", size, busy, inTx), dsn, busy, inTx, true})
			}
		}
	}
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			stop := keepBusy(t, k.dsn+simple, k.busy)
			defer stop()
			got := map[bool]int{}
			for range pools {
				db := openDB(t, k.dsn+simple, &recorder{})
				conn := mustConn(t, db)
				if k.inTx {
					mustExec(t, conn, "BEGIN")
				}
				_, err := conn.ExecContext(ctxFor(t), "SELECT pg_try_advisory_lock(42)")
				if err != nil && !errors.Is(err, pgadvlock.RuleTransactionPooling) {
					t.Fatal(err)
				}
				got[err != nil]++
				if k.inTx {
					mustExec(t, conn, "ROLLBACK")
				}
				must(t, conn.Close())
				must(t, db.Close())
			}
			if got[!k.refused] > 0 {
				t.Errorf("refused %d, let pass %d", got[true], got[false])
			}
		})
	}
}

// keepBusy runs clients that send a transaction after the other.
func keepBusy(t *testing.T, dsn string, clients int) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for range clients {
		c, err := pgconn.Connect(ctx, strings.TrimSuffix(dsn, simple))
		must(t, err)
		wg.Go(func() {
			defer c.Close(context.Background())
			for ctx.Err() == nil {
				if _, err := c.Exec(context.Background(), "BEGIN; SELECT 1; COMMIT").ReadAll(); err != nil {
					return
				}
			}
		})
	}
	return func() { cancel(); wg.Wait() }
}

// With the transaction on the pool's only backend nothing can be proved, and
// the caller's transaction is not disturbed by the attempt.
func TestFirstLockInTransactionOnTheOnlyBackend(t *testing.T) {
	server := pgtest.Shared(t)
	b := bench{rec: &recorder{}}
	b.db = openDB(t, server.Bouncer(t, "default_pool_size=1").DSN(server.NewDB(t), "transaction")+simple, b.rec)
	tx, err := b.db.BeginTx(ctxFor(t), nil)
	must(t, err)
	defer tx.Rollback()
	_, err = tx.ExecContext(ctxFor(t), "SELECT pg_try_advisory_lock(42)")
	if err != nil || len(b.rec.of(pgadvlock.RuleUnprovenPooling)) != 1 {
		t.Errorf("error %v, events %v", err, b.rec.all())
	}
}

// The probe uses connections of its own: no limit of the pool can block it.
func TestProbeNeedsNoConnectionOfThePool(t *testing.T) {
	server := pgtest.Shared(t)
	server.RequireBouncer(t)
	dsn := server.BouncerDSN(server.NewDB(t), "transaction") + simple
	t.Run("MaxOpenConns 1", func(t *testing.T) {
		db := openDB(t, dsn, &recorder{})
		db.SetMaxOpenConns(1)
		if err := onOne("SELECT pg_advisory_lock(42)")(t, db); !errors.Is(err, pgadvlock.RuleTransactionPooling) {
			t.Errorf("error %v", err)
		}
	})
	t.Run("pgxpool with MaxConns 1", func(t *testing.T) {
		cfg, err := pgxpool.ParseConfig(dsn)
		must(t, err)
		cfg.MaxConns = 1
		pool, err := pgxpool.NewWithConfig(ctxFor(t), cfg)
		must(t, err)
		defer pool.Close()
		c, err := pgadvlock.WrapConnector(stdlib.GetPoolConnector(pool), pgadvlock.WithLogger(quiet()))
		must(t, err)
		db := sql.OpenDB(c)
		defer db.Close()
		db.SetMaxIdleConns(0)
		if err := onOne("SELECT pg_advisory_lock(42)")(t, db); !errors.Is(err, pgadvlock.RuleTransactionPooling) {
			t.Errorf("error %v", err)
		}
	})
}

// Whatever the caller's connection is doing, finding out the pool mode does
// not disturb it.
func TestAskingDisturbsNothing(t *testing.T) {
	server := pgtest.Shared(t)
	server.RequireBouncer(t)
	name := server.NewDB(t)
	must(t, server.Exec(name, "CREATE TABLE seen (id int)"))
	cfg, err := pgx.ParseConfig(server.BouncerDSN(name, "session") + simple)
	must(t, err)
	var notified, queries atomic.Int64
	cfg.OnNotification = func(_ *pgconn.PgConn, n *pgconn.Notification) {
		if n.Channel != "mine" {
			t.Errorf("a notification on %q", n.Channel)
		}
		notified.Add(1)
	}
	cfg.Tracer = countingTracer{&queries}
	connName := stdlib.RegisterConnConfig(cfg)
	defer stdlib.UnregisterConnConfig(connName)
	db := openDB(t, connName, &recorder{})
	conn := mustConn(t, db)
	defer conn.Close()

	mustExec(t, conn, "LISTEN mine")
	mustExec(t, conn, "BEGIN ISOLATION LEVEL REPEATABLE READ")
	var before, after int
	must(t, conn.QueryRowContext(ctxFor(t), "SELECT count(*) FROM seen").Scan(&before))
	see := pgtest.Observe(t, server.DSN(name))
	see.Exec("INSERT INTO seen VALUES (1)")
	see.Exec("NOTIFY mine")
	sent := queries.Load()
	mustExec(t, conn, "SELECT pg_advisory_lock(42)")
	if n := queries.Load() - sent; n != 1 {
		t.Errorf("the caller's tracer saw %d queries", n)
	}
	must(t, conn.QueryRowContext(ctxFor(t), "SELECT count(*) FROM seen").Scan(&after))
	if before != after {
		t.Errorf("the snapshot changed: %d rows, then %d", before, after)
	}
	mustExec(t, conn, "COMMIT")
	pgtest.Eventually(t, 2*time.Second, "the notification", func() bool {
		mustExec(t, conn, "SELECT 1")
		return notified.Load() == 1
	})
	mustExec(t, conn, "SELECT pg_advisory_unlock(42)")

	// In a failed transaction nothing is asked, and PostgreSQL's error is the answer.
	fresh := mustConn(t, openDB(t, connName, &recorder{}))
	defer fresh.Close()
	mustExec(t, fresh, "BEGIN")
	_, _ = fresh.ExecContext(ctxFor(t), "SELECT 1/0")
	if _, err := fresh.ExecContext(ctxFor(t), "SELECT pg_advisory_lock(43)"); sqlState(err) != "25P02" {
		t.Errorf("error %v", err)
	}
	mustExec(t, fresh, "ROLLBACK")
	mustExec(t, fresh, "SELECT pg_advisory_lock(43)")
	mustExec(t, fresh, "SELECT pg_advisory_unlock(43)")
}

type countingTracer struct{ n *atomic.Int64 }

func (c countingTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.n.Add(1)
	return ctx
}
func (countingTracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// A context that ends, and a server that goes away, in the middle of the first
// question are reported as pgx reports them.
func TestFaultsWhileAsking(t *testing.T) {
	b := setUp(t)
	conn := mustConn(t, b.db)
	pid := backendPID(t, conn)
	thaw := pgtest.Freeze(t, int(pid))
	ctx, cancel := context.WithTimeout(ctxFor(t), 50*time.Millisecond)
	defer cancel()
	if _, err := conn.ExecContext(ctx, "SELECT pg_advisory_lock(42)"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
	thaw()
	must(t, conn.Close())

	conn = mustConn(t, b.db)
	defer conn.Close()
	b.see.Exec("SELECT pg_terminate_backend($1, 5000)", backendPID(t, conn))
	var pg *pgconn.PgError
	if _, err := conn.ExecContext(ctxFor(t), "SELECT pg_advisory_lock(42)"); !errors.As(err, &pg) || pg.Code != "57P01" {
		t.Errorf("error %v", err)
	}
}

// A config with several hosts names the first, not the one that answered: the
// probe must go where the connection went.
func TestProbeGoesWhereTheConnectionWent(t *testing.T) {
	server := pgtest.Shared(t)
	server.RequireBouncer(t)
	name := server.NewDB(t)
	cfg, err := pgx.ParseConfig(server.BouncerDSN(name, "transaction"))
	must(t, err)
	// A port that nobody listens on comes first.
	dsn := fmt.Sprintf("postgres://%s@127.0.0.1:1,localhost:%d/%s?default_query_exec_mode=exec", cfg.User, cfg.Port, name)
	db := openDB(t, dsn, &recorder{})
	if err := onOne("SELECT pg_advisory_lock(42)")(t, db); !errors.Is(err, pgadvlock.RuleTransactionPooling) {
		t.Errorf("error %v", err)
	}
}

// The verdict is shared: the second connection asks for itself, and does not
// probe.
func TestVerdictIsShared(t *testing.T) {
	server := pgtest.Private(t, "log_connections=on")
	server.RequireBouncer(t)
	bouncer := server.Bouncer(t, "default_pool_size=5")
	db := openDB(t, bouncer.DSN(server.NewDB(t), "transaction")+simple, &recorder{})
	first, second := mustConn(t, db), mustConn(t, db)
	defer first.Close()
	defer second.Close()
	_, err := first.ExecContext(ctxFor(t), "SELECT pg_advisory_lock(42)")
	logins := strings.Count(bouncer.Log(), "login attempt")
	_, err2 := second.ExecContext(ctxFor(t), "SELECT pg_advisory_lock(42)")
	if !errors.Is(err, pgadvlock.RuleTransactionPooling) || !errors.Is(err2, pgadvlock.RuleTransactionPooling) {
		t.Errorf("errors %v, %v", err, err2)
	}
	if n := strings.Count(bouncer.Log(), "login attempt") - logins; n != 0 || logins < 4 {
		t.Errorf("%d logins for the first, %d more for the second", logins, n)
	}
}
