package pgadvlock

// This file owns the measurements: what is counted, under which names. No key
// and no text of the program is ever an attribute, so their number is bounded.

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"

	"github.com/pgadvlock/pgadvlock/internal/ledger"
)

// metrics are the instruments of one Connector.
type metrics struct {
	connector *Connector
	wait      metric.Float64Histogram
	hold      metric.Float64Histogram
	events    metric.Int64Counter
	resets    metric.Int64Counter
	lookups   metric.Int64Counter
	panics    metric.Int64Counter
	callback  metric.Registration

	// where is the server's address and database, and the pool's name, known
	// from the first connection on.
	where atomic.Pointer[attribute.Set]

	mu      sync.Mutex // guards the two below
	pool    string     // the name taken from poolNames, "" when there is none
	stopped bool
}

// poolNames are the names of the Connectors that are being measured. It is the
// one thing that Connectors share besides the registered driver: their
// measurements meet in a MeterProvider, which is usually the process's and cannot
// be asked who else is there, and of two observations of a gauge with the same
// attributes the last one hides the other. A name that needs no such list, as
// from a counter or an address, would make new time series for every Connector
// that a program opens and closes; these are as many as are open at once.
var poolNames names

// names are names in use.
type names struct {
	mu    sync.Mutex // guards taken
	taken map[string]struct{}
}

// take takes the name, or with the smallest suffix that is free: name#2.
func (n *names) take(name string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	free := name
	for i := 2; ; i++ {
		if _, taken := n.taken[free]; !taken {
			break
		}
		free = fmt.Sprintf("%s#%d", name, i)
	}
	if n.taken == nil {
		n.taken = map[string]struct{}{}
	}
	n.taken[free] = struct{}{}
	return free
}

func (n *names) release(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.taken, name)
}

// durationBuckets are seconds: a lock is waited for and held from less than a
// round trip to minutes.
var durationBuckets = []float64{0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300}

func newMetrics(c *Connector) (*metrics, error) {
	provider := c.settings.meterProvider
	if provider == nil {
		provider = otel.GetMeterProvider()
	}
	meter := provider.Meter(thisPackage, metric.WithInstrumentationVersion(version()), metric.WithSchemaURL(semconv.SchemaURL))
	m := &metrics{connector: c}
	m.where.Store(attribute.EmptySet())
	var errs [11]error
	buckets := metric.WithExplicitBucketBoundaries(durationBuckets...)
	m.wait, errs[0] = meter.Float64Histogram("pgadvlock.wait.duration", metric.WithUnit("s"), buckets,
		metric.WithDescription("How long plain statements waited for advisory locks, granted or not."))
	m.hold, errs[1] = meter.Float64Histogram("pgadvlock.hold.duration", metric.WithUnit("s"), buckets,
		metric.WithDescription("How long advisory locks were held."))
	m.events, errs[2] = meter.Int64Counter("pgadvlock.events", metric.WithUnit("{event}"),
		metric.WithDescription("Findings of the rules."))
	m.resets, errs[3] = meter.Int64Counter("pgadvlock.resets", metric.WithUnit("{reset}"),
		metric.WithDescription("Connections that came back holding session locks, or perhaps, and what was done."))
	m.lookups, errs[4] = meter.Int64Counter("pgadvlock.blocker_lookups", metric.WithUnit("{lookup}"),
		metric.WithDescription("Questions who holds a lock that is waited for."))
	m.panics, errs[10] = meter.Int64Counter("pgadvlock.handler_panics", metric.WithUnit("{panic}"),
		metric.WithDescription("Panics of the program's event handler, recovered."))
	held, err := meter.Int64ObservableUpDownCounter("pgadvlock.locks.held", metric.WithUnit("{lock}"),
		metric.WithDescription("Advisory locks held, each once however often it was taken."))
	errs[5] = err
	waiting, err := meter.Int64ObservableUpDownCounter("pgadvlock.locks.waiting", metric.WithUnit("{lock}"),
		metric.WithDescription("Waiting lock calls that were sent and not answered yet."))
	errs[6] = err
	oldest, err := meter.Float64ObservableGauge("pgadvlock.locks.oldest", metric.WithUnit("s"),
		metric.WithDescription("Age of the oldest session lock held; 0 when none is."))
	errs[7] = err
	connections, err := meter.Int64ObservableUpDownCounter("pgadvlock.connections", metric.WithUnit("{connection}"),
		metric.WithDescription("Open connections by pool mode; auto: not asked yet."))
	errs[8] = err
	m.callback, errs[9] = meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		set := m.where.Load()
		if set.Len() == 0 {
			return nil // no connection was made yet: nothing is known, not even of what
		}
		where := metric.WithAttributeSet(*set)
		var now = time.Now()
		var age time.Duration
		heldBy, waits, modes := map[ledger.Lock[struct{}]]int64{}, int64(0), map[PoolMode]int64{}
		for _, cn := range c.connections() {
			modes[cn.poolMode()]++
			_, locks, attempts := cn.ledger.Snapshot()
			waits += int64(len(attempts))
			for _, l := range locks {
				heldBy[ledger.Lock[struct{}]{Share: l.Share, Xact: l.Xact}]++
				if !l.Xact {
					age = max(age, now.Sub(l.Origin.since))
				}
			}
		}
		for kind, n := range heldBy {
			o.ObserveInt64(held, n, where, metric.WithAttributes(attrLockMode.String(modeOf(kind.Share).String()), attrScope.String(scopeOf(kind.Xact).String())))
		}
		for mode, n := range modes {
			o.ObserveInt64(connections, n, where, metric.WithAttributes(attrPoolMode.String(mode.String())))
		}
		o.ObserveInt64(waiting, waits, where)
		o.ObserveFloat64(oldest, age.Seconds(), where)
		return nil
	}, held, waiting, oldest, connections)
	return m, errors.Join(errs[:]...)
}

// stop ends the observations, which hold on to the Connector. The pool's name is
// free then: what is still counted under it, as connections end, is added to
// what the next one counts.
func (m *metrics) stop() {
	_ = m.callback.Unregister() // fails for a provider that is shut down, which observes nothing
	m.mu.Lock()
	defer m.mu.Unlock()
	poolNames.release(m.pool)
	m.pool, m.stopped = "", true
}

// connected learns from a connection where the Connector leads.
func (m *metrics) connected(c *Conn) {
	if m.where.Load().Len() > 0 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.where.Load().Len() > 0 {
		return
	}
	attrs := c.serverAttributes()
	name := c.connector.settings.poolName
	if name == "" {
		name = poolName(attrs)
	}
	if !m.stopped {
		name = poolNames.take(name)
		m.pool = name
	}
	set := attribute.NewSet(append(attrs, semconv.DBClientConnectionPoolName(name))...)
	m.where.Store(&set)
}

// poolName is the name that the conventions have for a pool without one:
// server.address:server.port/db.namespace.
func poolName(server []attribute.KeyValue) string {
	set := attribute.NewSet(server...)
	address, known := set.Value(semconv.ServerAddressKey)
	if !known { // of a driver that is not pgx's
		return semconv.DBSystemNamePostgreSQL.Value.AsString()
	}
	port, _ := set.Value(semconv.ServerPortKey)
	database, _ := set.Value(semconv.DBNamespaceKey)
	return fmt.Sprintf("%s:%d/%s", address.AsString(), port.AsInt64(), database.AsString())
}

// waited records what came of a plain statement's waits.
func (m *metrics) waited(ctx context.Context, began time.Time, attempts []ledger.Attempt[origin], outcome func(int) string) {
	if !m.wait.Enabled(ctx) {
		return
	}
	seconds := time.Since(began).Seconds()
	for i, at := range attempts {
		if at.Func.Blocking() {
			m.wait.Record(ctx, seconds, metric.WithAttributeSet(*m.where.Load()), metric.WithAttributes(
				attrOutcome.String(outcome(i)), attrLockMode.String(modeOf(at.Func.Share()).String()), attrScope.String(scopeOf(!at.Func.Session()).String())))
		}
	}
}

// held records that a lock has ended.
func (m *metrics) held(ctx context.Context, e ledger.Ended[origin]) {
	if !m.hold.Enabled(ctx) {
		return
	}
	m.hold.Record(ctx, time.Since(e.Origin.since).Seconds(), metric.WithAttributeSet(*m.where.Load()), metric.WithAttributes(
		attrEnd.String(e.End.String()), attrLockMode.String(modeOf(e.Share).String()), attrScope.String(scopeOf(e.Xact).String())))
}

func (m *metrics) found(ctx context.Context, e Event) {
	if m.events.Enabled(ctx) {
		m.events.Add(ctx, 1, metric.WithAttributeSet(*m.where.Load()),
			metric.WithAttributes(attrRule.String(string(e.Rule)), attrLevel.String(e.Level.String())))
	}
}

// reset records a release at the return to the pool.
func (m *metrics) reset(ctx context.Context, discard bool, err error) {
	kind := "unlock_all"
	if discard {
		kind = "discard_all"
	}
	m.resetOf(ctx, kind, err)
}

// gaveUp records that a connection was closed instead.
func (m *metrics) gaveUp(ctx context.Context) { m.resetOf(ctx, "close", nil) }

func (m *metrics) resetOf(ctx context.Context, kind string, err error) {
	if m.resets.Enabled(ctx) {
		m.resets.Add(ctx, 1, metric.WithAttributeSet(*m.where.Load()),
			metric.WithAttributes(attrReset.String(kind), attrResult.String(result(err))))
	}
}

// lookedUp records a question who holds a lock.
func (m *metrics) lookedUp(ctx context.Context, err error) {
	if m.lookups.Enabled(ctx) {
		m.lookups.Add(ctx, 1, metric.WithAttributeSet(*m.where.Load()), metric.WithAttributes(attrResult.String(result(err))))
	}
}

// panicked records that the program's event handler panicked.
func (m *metrics) panicked(ctx context.Context) {
	if m.panics.Enabled(ctx) {
		m.panics.Add(ctx, 1, metric.WithAttributeSet(*m.where.Load()))
	}
}

func result(err error) string {
	if err != nil {
		return "failed"
	}
	return "ok"
}
