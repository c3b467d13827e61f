package pgadvlock

//lint:file-ignore SA1019 Drivers that have nothing newer must keep working, as they do on database/sql.

// This file owns the seam to database/sql: the registered driver, the
// connector, the connection with its two lanes, and what stands in where the
// driver underneath lacks an optional interface. What happens to a lock
// statement is in interceptor.go; what happens at the return to the pool is in
// reset.go.

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"go.opentelemetry.io/otel/trace"

	"github.com/pgadvlock/pgadvlock/internal/ledger"
	"github.com/pgadvlock/pgadvlock/internal/locksql"
)

var (
	_ driver.Driver        = (*Driver)(nil)
	_ driver.DriverContext = (*Driver)(nil)

	_ driver.Connector = (*Connector)(nil)
	_ io.Closer        = (*Connector)(nil)

	_ driver.Conn               = (*Conn)(nil)
	_ driver.ConnBeginTx        = (*Conn)(nil)
	_ driver.ConnPrepareContext = (*Conn)(nil)
	_ driver.ExecerContext      = (*Conn)(nil)
	_ driver.NamedValueChecker  = (*Conn)(nil)
	_ driver.Pinger             = (*Conn)(nil)
	_ driver.QueryerContext     = (*Conn)(nil)
	_ driver.SessionResetter    = (*Conn)(nil)
	_ driver.Validator          = (*Conn)(nil)
)

func init() { Register("pgadvlock") }

// Register makes a driver available to sql.Open under the name, with options
// of its own; "pgadvlock" is registered already, with none. Like sql.Register
// it panics when the name is taken; it also panics on an invalid option.
func Register(name string, opts ...Option) {
	if _, err := fromOptions(opts); err != nil {
		panic(err)
	}
	sql.Register(name, &Driver{opts: slices.Clone(opts)})
}

// Driver is what [Register] registers. The Driver of an open *sql.DB belongs
// to its Connector: see [ConnectorOf].
type Driver struct {
	opts      []Option
	connector *Connector // nil for the registered one
}

// Open opens one connection, as sql.DB would. It is there for driver.Driver;
// database/sql uses OpenConnector.
func (d *Driver) Open(name string) (driver.Conn, error) {
	c, err := d.OpenConnector(name)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute) // as pgx's own
	defer cancel()
	conn, err := c.Connect(ctx)
	if err != nil {
		return nil, errors.Join(err, c.(*Connector).Close())
	}
	conn.(*Conn).alone = true
	return conn, nil
}

// OpenConnector reads the DSN; see [NewConnector].
func (d *Driver) OpenConnector(name string) (driver.Connector, error) {
	c, err := NewConnector(name, d.opts...)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Connector makes connections for one *sql.DB, and owns what they have in
// common. Its methods are safe for concurrent use.
type Connector struct {
	base       driver.Connector
	settings   *settings
	driver     *Driver
	recognizer *locksql.Recognizer
	discipline discipline
	log        logLimit
	tracer     trace.Tracer
	metrics    *metrics

	roads        roads
	orders       orderGraph
	sites        callSites
	asking       chan struct{} // holds a token while a connection asks who holds a lock
	peerRefused  atomic.Bool   // the server does not take the settings of pgadvlock_dead_peer
	saidUnproven atomic.Bool   // of a driver that is not pgx's, unproven-pooling is said once
	reports      atomic.Int64  // when pg_locks was last read for a report, in Unix nanoseconds

	mu    sync.Mutex // guards conns
	conns map[*Conn]struct{}
}

// NewConnector reads a DSN as the pgx driver does, in URL or keyword form or
// as a name from stdlib.RegisterConnConfig; our own parameters (pgadvlock_x)
// are taken out of it first. It returns an error, which never contains a
// password, when one of those, an option or an environment variable is wrong.
// Everything else in the DSN is read, and complained about, by pgx when the
// first connection is made.
func NewConnector(dsn string, opts ...Option) (*Connector, error) {
	rest, params, err := splitDSN(dsn)
	if err != nil {
		return nil, err
	}
	base, err := stdlib.GetDefaultDriver().(driver.DriverContext).OpenConnector(rest)
	if err != nil {
		return nil, err
	}
	return newConnector(base, opts, params)
}

// WrapConnector puts pgadvlock around another connector for PostgreSQL:
// stdlib.GetConnector and stdlib.GetPoolConnector of pgx, lib/pq, one that signs
// in to a cloud, or a wrapper around one of these. Over a driver that is not
// pgx's, or a wrapper whose connections do not show pgx's by a method
// Raw() driver.Conn, the driver cannot ask what stands between it and the
// server; say it with [WithPoolMode], or a connection that comes back holding a
// lock is closed instead of cleaned.
func WrapConnector(base driver.Connector, opts ...Option) (*Connector, error) {
	if base == nil {
		return nil, errors.New("pgadvlock: WrapConnector: nil connector")
	}
	return newConnector(base, opts, nil)
}

func newConnector(base driver.Connector, opts []Option, params []param) (*Connector, error) {
	s, err := resolve(opts, params)
	if err != nil {
		return nil, err
	}
	c := &Connector{
		base:       base,
		settings:   s,
		recognizer: locksql.New(s.functions),
		tracer:     newTracer(s),
		conns:      map[*Conn]struct{}{},
		asking:     make(chan struct{}, 1),
	}
	c.driver = &Driver{opts: opts, connector: c}
	if c.metrics, err = newMetrics(c); err != nil {
		return nil, fmt.Errorf("pgadvlock: metrics: %w", err)
	}
	c.discipline.set(func(l *levels) { l.preset, l.rules = s.preset, s.rules })
	return c, nil
}

// ConnectorOf returns the Connector behind a *sql.DB; ok is false when the DB
// was opened with another driver, or when a middleware outside hides it.
func ConnectorOf(db *sql.DB) (c *Connector, ok bool) {
	d, ok := db.Driver().(*Driver)
	if !ok || d.connector == nil {
		return nil, false
	}
	return d.connector, true
}

// Driver returns a *Driver that belongs to this Connector alone.
func (c *Connector) Driver() driver.Driver { return c.driver }

// Close closes the connector underneath, if it has something to close, and
// stops its metrics. The *sql.DB calls it at its own Close.
func (c *Connector) Close() error {
	c.metrics.stop()
	if closer, ok := c.base.(io.Closer); ok {
		return closer.Close()
	}
	return nil
}

// Connect makes a connection. sql.DB calls it.
func (c *Connector) Connect(ctx context.Context) (driver.Conn, error) {
	inner, err := c.base.Connect(ctx)
	if err != nil {
		return nil, err
	}
	cn := newConn(c, inner)
	if err := cn.prepare(ctx); err != nil {
		_ = inner.Close() // the caller hears why
		return nil, err
	}
	c.metrics.connected(cn)
	c.mu.Lock()
	c.conns[cn] = struct{}{}
	c.mu.Unlock()
	return cn, nil
}

func (c *Connector) forget(cn *Conn) {
	c.mu.Lock()
	delete(c.conns, cn)
	c.mu.Unlock()
}

// Sessions returns what the connections of this Connector hold and wait for
// now, those with nothing to tell left out. It asks the ledgers, not the
// server.
func (c *Connector) Sessions() []Session {
	var sessions []Session
	for _, cn := range c.connections() {
		state, held, waiting := cn.ledger.Snapshot()
		if state == ledger.Clean && len(held) == 0 && len(waiting) == 0 {
			continue
		}
		s := Session{BackendPID: cn.backendPID.Load(), PoolMode: cn.poolMode(), Exact: state <= ledger.Exact}
		for _, l := range held {
			s.Held = append(s.Held, publicLock(l))
		}
		for _, at := range waiting {
			s.Waiting = append(s.Waiting, attemptedLock(at))
		}
		sessions = append(sessions, s)
	}
	slices.SortFunc(sessions, func(a, b Session) int { return int(int64(a.BackendPID) - int64(b.BackendPID)) })
	return sessions
}

func (c *Connector) connections() []*Conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Keys(c.conns))
}

// Conn is one connection: what (*sql.Conn).Raw hands out. It may be used only
// inside Raw, and not from several goroutines.
//
// database/sql calls it one method at a time, under the lock of its own
// driverConn; fields without a comment rely on that.
type Conn struct {
	inner     driver.Conn
	queryer   driver.QueryerContext
	execer    driver.ExecerContext
	beginner  driver.ConnBeginTx
	preparer  driver.ConnPrepareContext
	checker   driver.NamedValueChecker // nil when inner has none, like validator
	validator driver.Validator
	// onlyPrepares is whether inner has neither Execer nor Queryer, so that
	// everything is prepared; arguments are checked by the statement then.
	onlyPrepares bool

	pgx       *pgx.Conn // nil when inner is not pgx's
	connector *Connector
	ledger    ledger.Ledger[origin]
	lock      *interceptor                       // the lock lane; nil until the first plain lock statement
	starts    map[string][]trace.SpanStartOption // nil until the first span
	watch     *watch                             // over the waits; nil until the first
	room      []ledger.Attempt[origin]           // for those of the next plain lock statement

	// armed is ledger.Armed(), kept here because the fast lane reads it for
	// every statement.
	armed bool
	// inTx is whether a transaction was begun and not ended, for drivers that
	// do not tell (see inTransaction).
	inTx bool
	// isolation is that of the open transaction, as far as its beginning was
	// seen, and defaultIsolation that of one that says nothing; "" is not known.
	isolation, defaultIsolation string
	// lent is whether the raw connection was ever lent out: then there may be
	// prepared statements that nobody saw.
	lent bool
	// toldLeak is what was reported last of locks that were left where they are.
	toldLeak                    string
	startIsolation, txIsolation string // defaultIsolation at connecting, and when the transaction began
	// alone is whether the Connector was made for this connection and ends with
	// it.
	alone bool
	// judged is whether IsValid has seen the connection since it was last
	// handed out, and sent whether a plain lock statement was sent since then.
	judged, sent bool

	evidence string    // what mode was concluded from
	asked    time.Time // when mode was concluded; zero when a setting says it

	mode       atomic.Uint32 // PoolMode; written by the connection, read by Sessions
	backendPID atomic.Uint32 // likewise
}

func newConn(c *Connector, inner driver.Conn) *Conn {
	cn := &Conn{inner: inner, connector: c}
	cn.queryer = queryerOf(inner)
	cn.execer = execerOf(inner)
	cn.beginner = beginnerOf(inner)
	cn.preparer = preparerOf(inner)
	cn.onlyPrepares = cn.queryer == skip{} && cn.execer == skip{}
	cn.checker, _ = inner.(driver.NamedValueChecker)
	cn.validator, _ = inner.(driver.Validator)
	if cn.pgx = pgxUnder(inner); cn.pgx != nil {
		cn.backendPID.Store(cn.pgx.PgConn().PID())
		params := cn.pgx.Config().RuntimeParams
		if strings.EqualFold(params["default_transaction_isolation"], "repeatable read") ||
			strings.Contains(params["options"], `default_transaction_isolation=repeatable\ read`) {
			cn.startIsolation = "repeatable read"
			cn.defaultIsolation = cn.startIsolation
		}
	}
	if mode := c.settings.poolMode; mode != PoolAuto {
		cn.mode.Store(uint32(mode))
		cn.evidence = "as pgadvlock_pool_mode says"
	}
	return cn
}

// pgxUnder finds pgx's connection, also under wrappers that show what they wrap
// as XSAM/otelsql's and many others do (Raw), or DataDog's (WrappedConn). What
// the program sends still goes through them.
func pgxUnder(inner driver.Conn) *pgx.Conn {
	for range 8 { // a wrapper may show itself
		switch c := inner.(type) {
		case interface{ Conn() *pgx.Conn }:
			return c.Conn()
		case interface{ Raw() driver.Conn }:
			inner = c.Raw()
		case interface{ WrappedConn() driver.Conn }:
			inner = c.WrappedConn()
		default:
			return nil
		}
	}
	return nil
}

// prepare does what the settings want of a new connection.
func (c *Conn) prepare(ctx context.Context) error {
	s := c.connector.settings
	switch {
	case c.pgx == nil && s.reset == ResetDiscardAll:
		return errors.New("pgadvlock: pgadvlock_reset=discard_all needs the pgx driver underneath: use unlock_all")
	case c.pgx == nil && s.afterConnect != nil:
		return errors.New("pgadvlock: WithAfterConnect needs the pgx driver underneath")
	case s.afterConnect != nil:
		return s.afterConnect(ctx, c.Conn()) // lent out: what it locks is released like anything else
	}
	return nil
}

// Conn returns the pgx connection, for what database/sql has no words for:
// COPY, LISTEN, batches. It is nil when the driver underneath is not pgx's.
// What is done with it goes unseen, so the connection is cleaned when it comes
// back into the pool, which costs a round trip.
func (c *Conn) Conn() *pgx.Conn {
	if c.pgx != nil {
		c.ledger.Escape()
		c.armed, c.lent, c.isolation = true, true, ""
	}
	return c.pgx
}

// rearm must follow every write to the ledger: it brings armed up to date and
// tells telemetry of the locks that have ended. A driver that does not tell its
// transaction status is also followed until a transaction that a text began
// has ended.
func (c *Conn) rearm() {
	armed, ended := c.ledger.Settled()
	c.armed = armed || c.pgx == nil && c.inTx
	for _, e := range ended {
		c.endHold(e)
	}
}

// fast reports whether the statement has nothing to do with locks: it then
// goes straight to the inner connection.
func (c *Conn) fast(query string) bool {
	return !c.armed && !c.connector.recognizer.Mentions(query) && !begins(query) && !(c.lent && (bare(query) || mayStep(query)))
}

// QueryContext implements driver.QueryerContext.
func (c *Conn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	if c.fast(query) {
		return c.queryer.QueryContext(ctx, query, args)
	}
	return c.watchedQuery(ctx, query, args) // on its own, for the sake of the fast lane's stack frame
}

func (c *Conn) watchedQuery(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	st := c.parse(query)
	if c.plain(st, args) {
		if _, none := c.queryer.(skip); none {
			return nil, driver.ErrSkip // before anything is recorded: database/sql will Prepare it
		}
		return c.lockLane(st, c.connector.sites.find(c.asks(st))).QueryContext(ctx, query, args)
	}
	var rows driver.Rows
	err := c.opaque(ctx, query, st, func() (err error) {
		rows, err = c.queryer.QueryContext(ctx, query, args)
		return err
	})
	return rows, err
}

// ExecContext implements driver.ExecerContext.
func (c *Conn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	if c.fast(query) {
		return c.execer.ExecContext(ctx, query, args)
	}
	return c.watchedExec(ctx, query, args)
}

func (c *Conn) watchedExec(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	st := c.parse(query)
	if c.plain(st, args) {
		if _, none := c.execer.(skip); none {
			return nil, driver.ErrSkip
		}
		return c.lockLane(st, c.connector.sites.find(c.asks(st))).ExecContext(ctx, query, args)
	}
	var result driver.Result
	err := c.opaque(ctx, query, st, func() (err error) {
		result, err = c.execer.ExecContext(ctx, query, args)
		return err
	})
	return result, err
}

// Prepare implements driver.Conn.
func (c *Conn) Prepare(query string) (driver.Stmt, error) {
	return c.PrepareContext(context.Background(), query)
}

// PrepareContext implements driver.ConnPrepareContext. A statement that has
// nothing to do with locks is the inner driver's own.
func (c *Conn) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	if !c.armed && !mayStep(query) && !c.onlyPrepares && !(c.lent && bare(query)) && !c.connector.recognizer.Mentions(query) {
		return c.preparer.PrepareContext(ctx, query)
	}
	st := c.parse(query)
	if st.Session {
		if err := c.admitPrepare(ctx, st); err != nil {
			return nil, err
		}
	}
	inner, err := c.preparer.PrepareContext(ctx, query)
	if err != nil {
		c.mourn(ctx, err)
	}
	if err != nil || st.Form == locksql.NoCall && len(st.Steps) == 0 && !c.onlyPrepares {
		return inner, err
	}
	return newStmt(c, inner, query, st), nil
}

// Begin implements driver.Conn.
func (c *Conn) Begin() (driver.Tx, error) {
	return c.BeginTx(context.Background(), driver.TxOptions{})
}

// BeginTx implements driver.ConnBeginTx.
func (c *Conn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	t, err := c.beginner.BeginTx(ctx, opts)
	if err != nil {
		c.mourn(ctx, err)
		return nil, err
	}
	c.inTx, c.isolation, c.txIsolation = true, c.defaultIsolation, c.defaultIsolation
	switch sql.IsolationLevel(opts.Isolation) {
	case sql.LevelDefault:
	case sql.LevelRepeatableRead, sql.LevelSnapshot:
		c.isolation = "repeatable read"
	default:
		c.isolation = "another" // which one makes no difference to any rule
	}
	return &tx{t, c}, nil
}

// CheckNamedValue implements driver.NamedValueChecker.
func (c *Conn) CheckNamedValue(nv *driver.NamedValue) error {
	if c.onlyPrepares {
		return nil // without Execer and Queryer, the statement's turn is the only one
	}
	return c.checkNamedValue(nv)
}

// checkNamedValue is the inner connection's check. ErrSkip makes database/sql
// do what it does for a connection that has none.
func (c *Conn) checkNamedValue(nv *driver.NamedValue) error {
	if c.checker == nil {
		return driver.ErrSkip
	}
	return c.checker.CheckNamedValue(nv)
}

// Ping implements driver.Pinger.
func (c *Conn) Ping(ctx context.Context) error {
	if pinger, ok := c.inner.(driver.Pinger); ok {
		return pinger.Ping(ctx)
	}
	return nil
}

// Close implements driver.Conn. Locks that are still held are released first,
// or end with the connection, also where the inner Close would only hand it
// back to another pool.
func (c *Conn) Close() error {
	c.connector.forget(c)
	c.watch.close()
	c.abandon()
	err := c.inner.Close()
	if c.alone {
		err = errors.Join(err, c.connector.Close())
	}
	return err
}

// tx is a transaction begun through database/sql. Transaction locks end with
// it.
type tx struct {
	driver.Tx
	conn *Conn
}

func (t *tx) Commit() error {
	err := t.Tx.Commit()
	if err != nil {
		t.conn.mourn(context.Background(), err)
	}
	t.conn.transactionEnded()
	return err
}

func (t *tx) Rollback() error {
	err := t.Tx.Rollback()
	if err != nil {
		t.conn.mourn(context.Background(), err)
	}
	t.conn.defaultIsolation = t.conn.txIsolation
	t.conn.transactionEnded()
	return err
}

func (c *Conn) transactionEnded() {
	c.inTx, c.isolation = false, ""
	if c.armed {
		c.ledger.EndTransaction()
		_ = c.settleDoubts(context.Background()) // of an earlier statement
		c.rearm()
	}
}

// inTransaction reports whether a transaction is open, failed ones included.
// Drivers that are not pgx's do not tell; for them it is what database/sql was
// asked and what the texts said.
func (c *Conn) inTransaction() bool {
	if c.pgx != nil {
		return c.pgx.PgConn().TxStatus() != 'I'
	}
	return c.inTx
}

// The rest stands in for optional interfaces, as database/sql itself would
// (ctxDriverPrepare, ctxDriverExec and their like in database/sql/ctxutil.go).

// skip sends database/sql to Prepare, as a connection without Queryer or
// Execer does.
type skip struct{}

func (skip) QueryContext(context.Context, string, []driver.NamedValue) (driver.Rows, error) {
	return nil, driver.ErrSkip
}

func (skip) ExecContext(context.Context, string, []driver.NamedValue) (driver.Result, error) {
	return nil, driver.ErrSkip
}

func queryerOf(inner driver.Conn) driver.QueryerContext {
	switch q := inner.(type) {
	case driver.QueryerContext:
		return q
	case driver.Queryer:
		return legacyQueryer{q}
	}
	return skip{}
}

func execerOf(inner driver.Conn) driver.ExecerContext {
	switch e := inner.(type) {
	case driver.ExecerContext:
		return e
	case driver.Execer:
		return legacyExecer{e}
	}
	return skip{}
}

func beginnerOf(inner driver.Conn) driver.ConnBeginTx {
	if b, ok := inner.(driver.ConnBeginTx); ok {
		return b
	}
	return legacyBeginner{inner}
}

func preparerOf(inner driver.Conn) driver.ConnPrepareContext {
	if p, ok := inner.(driver.ConnPrepareContext); ok {
		return p
	}
	return legacyPreparer{inner}
}

type legacyQueryer struct {
	driver.Queryer
}

func (q legacyQueryer) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	values, err := unnamed(ctx, args)
	if err != nil {
		return nil, err
	}
	return q.Query(query, values)
}

type legacyExecer struct {
	driver.Execer
}

func (e legacyExecer) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	values, err := unnamed(ctx, args)
	if err != nil {
		return nil, err
	}
	return e.Exec(query, values)
}

// unnamed turns arguments into what drivers older than Go 1.8 take.
func unnamed(ctx context.Context, args []driver.NamedValue) ([]driver.Value, error) {
	values := make([]driver.Value, len(args))
	for i, a := range args {
		if a.Name != "" {
			return nil, errors.New("sql: driver does not support the use of Named Parameters")
		}
		values[i] = a.Value
	}
	return values, ctx.Err()
}

type legacyBeginner struct{ driver.Conn }

func (b legacyBeginner) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	if sql.IsolationLevel(opts.Isolation) != sql.LevelDefault {
		return nil, errors.New("sql: driver does not support non-default isolation level")
	}
	if opts.ReadOnly {
		return nil, errors.New("sql: driver does not support read-only transactions")
	}
	t, err := b.Conn.Begin()
	if err == nil && ctx.Err() != nil {
		_ = t.Rollback() // the caller hears of the context, as from database/sql
		return nil, ctx.Err()
	}
	return t, err
}

type legacyPreparer struct{ driver.Conn }

func (p legacyPreparer) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	stmt, err := p.Conn.Prepare(query)
	if err == nil && ctx.Err() != nil {
		_ = stmt.Close() // as above
		return nil, ctx.Err()
	}
	return stmt, err
}
