package pgadvlock

// This file owns the measurements: what is counted, under which names. No key
// and no text of the program is ever an attribute, so their number is bounded.

import (
	"context"
	"errors"
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
	callback  metric.Registration

	// where is the server's address and database, known from the first
	// connection on.
	where atomic.Pointer[attribute.Set]
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
	var errs [10]error
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
		where := metric.WithAttributeSet(*m.where.Load())
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

// stop ends the observations, which hold on to the Connector.
func (m *metrics) stop() { _ = m.callback.Unregister() } // fails for a provider that is shut down, which observes nothing

// connected learns from a connection where the Connector leads.
func (m *metrics) connected(c *Conn) {
	if m.where.Load().Len() == 0 {
		set := attribute.NewSet(c.serverAttributes()...)
		m.where.Store(&set)
	}
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

func result(err error) string {
	if err != nil {
		return "failed"
	}
	return "ok"
}
