package integration

// Telemetry as an exporter gets it: spans through the SDK's in-memory
// exporter, metrics through its manual reader, each outcome provoked on the
// real server.

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/pgadvlock/pgadvlock"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

// told is a pool whose telemetry is kept.
type told struct {
	dsn    string
	db     *sql.DB
	see    *pgtest.Observer
	spans  *tracetest.InMemoryExporter
	tracer trace.Tracer
	reader *sdkmetric.ManualReader
	events []pgadvlock.Event
}

func tell(t *testing.T, dsn string, opts ...pgadvlock.Option) *told {
	t.Helper()
	k := &told{dsn: dsn, spans: tracetest.NewInMemoryExporter(), reader: sdkmetric.NewManualReader(), see: pgtest.Observe(t, dsn)}
	provider := sdktrace.NewTracerProvider(sdktrace.WithSyncer(k.spans))
	k.tracer = provider.Tracer("test")
	c, err := pgadvlock.NewConnector(dsn, append([]pgadvlock.Option{
		pgadvlock.WithTracerProvider(provider),
		pgadvlock.WithMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(k.reader))),
		pgadvlock.WithLogger(slog.New(slog.DiscardHandler)),
		pgadvlock.WithEventHandler(func(_ context.Context, e pgadvlock.Event) { k.events = append(k.events, e) }),
	}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	k.db = sql.OpenDB(c)
	t.Cleanup(func() { k.db.Close() })
	return k
}

func freshDSN(t *testing.T) string {
	server := pgtest.Shared(t)
	return server.DSN(server.NewDB(t))
}

func (k *told) conn(t *testing.T) *sql.Conn {
	t.Helper()
	c, err := k.db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// span returns the last span of that name.
func (k *told) span(t *testing.T, name string) tracetest.SpanStub {
	t.Helper()
	all := k.spans.GetSpans()
	for i := len(all) - 1; i >= 0; i-- {
		if all[i].Name == name {
			return all[i]
		}
	}
	t.Fatalf("no span %q in %v", name, names(all))
	return tracetest.SpanStub{}
}

func names(spans tracetest.SpanStubs) (names []string) {
	for _, s := range spans {
		names = append(names, s.Name)
	}
	return names
}

func attr(attrs []attribute.KeyValue, key string) string {
	for _, a := range attrs {
		if string(a.Key) == key {
			return a.Value.Emit()
		}
	}
	return ""
}

func assertAttrs(t *testing.T, attrs []attribute.KeyValue, want map[string]string) {
	t.Helper()
	for key, v := range want {
		if got := attr(attrs, key); got != v {
			t.Errorf("%s is %q, want %q", key, got, v)
		}
	}
}

// Every outcome of a wait, as the span has it.
func TestWaitSpans(t *testing.T) {
	lockTaken := func(k *told, _ *testing.T, _ *sql.Conn) { k.see.Lock(42) }
	setTimeout := func(k *told, t *testing.T, c *sql.Conn) {
		k.see.Lock(42)
		exec(t, c, "SET lock_timeout = '10ms'")
	}
	for _, c := range []struct {
		name    string
		before  func(*told, *testing.T, *sql.Conn)
		query   string
		args    []any
		timeout time.Duration
		opts    []pgadvlock.Option
		span    string
		status  codes.Code
		attrs   map[string]string
	}{
		{name: "acquired", query: "SELECT pg_advisory_lock($1)", args: []any{42}, span: "pg_advisory_lock", attrs: map[string]string{
			"pgadvlock.key": "42", "pgadvlock.key_space": "bigint", "pgadvlock.lock_mode": "exclusive", "pgadvlock.scope": "session",
			"pgadvlock.blocking": "true", "pgadvlock.outcome": "acquired", "pgadvlock.reentrant": "false", "pgadvlock.pool_mode": "direct",
			"db.system.name": "postgresql", "db.query.summary": "SELECT pg_advisory_lock", "db.query.text": "", "server.address": "127.0.0.1"}},
		{name: "reentrant", before: func(_ *told, t *testing.T, c *sql.Conn) { exec(t, c, "SELECT pg_advisory_lock(42)") },
			query: "SELECT pg_advisory_lock(42)", span: "pg_advisory_lock", attrs: map[string]string{"pgadvlock.reentrant": "true"}},
		{name: "share pair", query: "SELECT pg_try_advisory_lock_shared(4, 2)", span: "pg_try_advisory_lock_shared", attrs: map[string]string{
			"pgadvlock.key": "(4, 2)", "pgadvlock.key_space": "int,int", "pgadvlock.lock_mode": "share", "pgadvlock.blocking": "false", "pgadvlock.outcome": "acquired"}},
		{name: "transaction", query: "SELECT pg_advisory_xact_lock(42)", span: "pg_advisory_xact_lock", attrs: map[string]string{
			"pgadvlock.scope": "transaction", "pgadvlock.outcome": "acquired"}},
		{name: "not acquired", before: lockTaken, query: "SELECT pg_try_advisory_lock(42)", span: "pg_try_advisory_lock",
			attrs: map[string]string{"pgadvlock.outcome": "not_acquired", "error.type": ""}},
		{name: "released", before: func(_ *told, t *testing.T, c *sql.Conn) { exec(t, c, "SELECT pg_advisory_lock(42)") },
			query: "SELECT pg_advisory_unlock(42)", span: "pg_advisory_unlock", attrs: map[string]string{"pgadvlock.outcome": "released"}},
		{name: "not held", query: "SELECT pg_advisory_unlock(42)", span: "pg_advisory_unlock", attrs: map[string]string{"pgadvlock.outcome": "not_held"}},
		{name: "timeout", before: setTimeout, query: "SELECT pg_advisory_lock(42)", span: "pg_advisory_lock", status: codes.Error, attrs: map[string]string{
			"pgadvlock.outcome": "timeout", "error.type": "55P03", "db.response.status_code": "55P03"}},
		{name: "canceled by the server", before: func(k *told, t *testing.T, c *sql.Conn) {
			k.see.Lock(42)
			exec(t, c, "SET statement_timeout = '10ms'")
		}, query: "SELECT pg_advisory_lock(42)", span: "pg_advisory_lock", status: codes.Error, attrs: map[string]string{
			"pgadvlock.outcome": "canceled", "error.type": "57014"}},
		{name: "canceled by the context", before: lockTaken, query: "SELECT pg_advisory_lock(42)", timeout: 30 * time.Millisecond,
			span: "pg_advisory_lock", status: codes.Error, attrs: map[string]string{"pgadvlock.outcome": "canceled", "db.response.status_code": ""}},
		{name: "context over before", query: "SELECT pg_try_advisory_lock(42)", timeout: -1,
			span: "pg_try_advisory_lock", status: codes.Error, attrs: map[string]string{"pgadvlock.outcome": "canceled"}},
		{name: "refused", query: "SELECT pg_advisory_xact_lock(42)", opts: []pgadvlock.Option{pgadvlock.WithPreset(pgadvlock.PresetStrict)},
			span: "pg_advisory_xact_lock", status: codes.Error, attrs: map[string]string{
				"pgadvlock.outcome": "refused", "pgadvlock.rule": "xact-lock-autocommit", "error.type": "xact-lock-autocommit"}},
		{name: "error", before: func(_ *told, t *testing.T, c *sql.Conn) {
			exec(t, c, "BEGIN")
			_, _ = c.ExecContext(t.Context(), "SELECT 1/0")
		}, query: "SELECT pg_advisory_lock(42)", span: "pg_advisory_lock", status: codes.Error, attrs: map[string]string{
			"pgadvlock.outcome": "error", "error.type": "25P02"}},
		{name: "timeout of max_wait", before: lockTaken, query: "SELECT pg_advisory_lock(42)", opts: []pgadvlock.Option{pgadvlock.WithMaxWait(10 * time.Millisecond)},
			span: "pg_advisory_lock", status: codes.Error, attrs: map[string]string{"pgadvlock.outcome": "timeout", "error.type": "55P03", "pgadvlock.key": "42"}},
		{name: "opaque timeout", before: setTimeout, query: "DO $$ BEGIN PERFORM pg_advisory_lock(42); END $$", span: "advisory lock", status: codes.Error, attrs: map[string]string{
			"pgadvlock.outcome": "timeout", "error.type": "55P03", "db.response.status_code": "55P03"}},
		{name: "opaque, refused", query: "SELECT pg_advisory_lock(i) FROM generate_series(1, 2) i LIMIT 1", opts: []pgadvlock.Option{pgadvlock.WithPreset(pgadvlock.PresetStrict)},
			span: "advisory lock", status: codes.Error, attrs: map[string]string{"pgadvlock.outcome": "refused", "pgadvlock.rule": "lock-per-row", "error.type": "lock-per-row"}},
		{name: "null key", query: "SELECT pg_advisory_lock(NULL)", span: "pg_advisory_lock", attrs: map[string]string{"pgadvlock.outcome": "not_acquired", "error.type": ""}},
		{name: "opaque", query: "SELECT pg_advisory_lock(42) FROM generate_series(1, 2)", span: "advisory lock", attrs: map[string]string{
			"pgadvlock.outcome": "unknown", "pgadvlock.key": "", "db.query.summary": "advisory lock"}},
		{name: "several", query: "SELECT pg_advisory_lock(1), pg_try_advisory_lock(2)", span: "pg_advisory_lock", attrs: map[string]string{
			"pgadvlock.key": `["1","2"]`, "pgadvlock.outcome": `["acquired","acquired"]`}},
		{name: "text", query: "SELECT pg_advisory_lock(42) -- why", opts: []pgadvlock.Option{pgadvlock.WithQueryText(true)}, span: "pg_advisory_lock",
			attrs: map[string]string{"db.query.text": "SELECT pg_advisory_lock(42) -- why"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			k := tell(t, freshDSN(t), c.opts...)
			conn := k.conn(t)
			if c.before != nil {
				c.before(k, t, conn)
			}
			ctx, parent := k.tracer.Start(t.Context(), "caller")
			if c.timeout != 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, c.timeout)
				defer cancel()
			}
			_, err := conn.ExecContext(ctx, c.query, c.args...)
			if (err != nil) != (c.status == codes.Error) {
				t.Fatalf("error %v", err)
			}
			parent.End()
			span := k.span(t, c.span)
			if span.Status.Code != c.status || span.SpanKind != trace.SpanKindClient || span.Parent.SpanID() != parent.SpanContext().SpanID() ||
				span.InstrumentationScope.Name != "github.com/pgadvlock/pgadvlock" || span.InstrumentationScope.SchemaURL == "" {
				t.Errorf("span %+v", span)
			}
			assertAttrs(t, span.Attributes, c.attrs)
			told := attr(span.Attributes, "pgadvlock.rule")
			if told == "" {
				told = sqlState(err)
			}
			if kind := attr(span.Attributes, "error.type"); (kind != "") != (err != nil) || told != "" && kind != told || sqlState(err) != attr(span.Attributes, "db.response.status_code") {
				t.Errorf("error.type %q for %v", kind, err)
			}
		})
	}
}

func sqlState(err error) string {
	if pg := (*pgconn.PgError)(nil); errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}

func TestDeadlockSpan(t *testing.T) {
	k := tell(t, freshDSN(t), pgadvlock.WithRule(pgadvlock.RuleLockOrder, pgadvlock.LevelOff))
	a, b := k.conn(t), k.conn(t)
	exec(t, a, "SET deadlock_timeout = '10ms'")
	exec(t, a, "SELECT pg_advisory_lock(1)")
	exec(t, b, "SELECT pg_advisory_lock(2)")
	done := make(chan error)
	go func() {
		_, err := b.ExecContext(context.Background(), "SELECT pg_advisory_lock(1)")
		done <- err
	}()
	pgtest.Eventually(t, 5*time.Second, "a waiter", func() bool { return k.see.Waiting(1) })
	if _, err := a.ExecContext(t.Context(), "SELECT pg_advisory_lock(2)"); err == nil {
		t.Fatal("no deadlock")
	}
	span := k.span(t, "pg_advisory_lock")
	assertAttrs(t, span.Attributes, map[string]string{"pgadvlock.outcome": "deadlock", "error.type": "40P01", "db.response.status_code": "40P01"})
	if span.Status.Code != codes.Error {
		t.Errorf("status %+v", span.Status)
	}
	exec(t, a, "SELECT pg_advisory_unlock_all()")
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// A sampler sees the start attributes, and an unsampled wait makes no hold.
func TestSamplerSeesStartAttributes(t *testing.T) {
	seen := make(chan []attribute.KeyValue, 10)
	exporter := tracetest.NewInMemoryExporter()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSyncer(exporter), sdktrace.WithSampler(samplerFunc(func(p sdktrace.SamplingParameters) {
		seen <- p.Attributes
	})))
	k := tell(t, freshDSN(t), pgadvlock.WithTracerProvider(provider))
	conn := k.conn(t)
	exec(t, conn, "SELECT pg_advisory_lock(42)")
	u, _ := url.Parse(k.dsn)
	assertAttrs(t, <-seen, map[string]string{"db.system.name": "postgresql", "db.query.summary": "SELECT pg_advisory_lock", "server.address": "127.0.0.1",
		"server.port": u.Port(), "db.namespace": u.Path[1:]})
	if len(seen) > 0 || len(exporter.GetSpans()) > 0 {
		t.Errorf("%d more spans, exported %v", len(seen), names(exporter.GetSpans()))
	}
	k = tell(t, k.dsn, pgadvlock.WithTracerProvider(provider), pgadvlock.WithQueryText(true))
	conn = k.conn(t)
	for _, text := range []string{"SELECT pg_try_advisory_lock(42) -- why", "DO $$ BEGIN PERFORM pg_advisory_xact_lock(43); END $$"} {
		exec(t, conn, text)
		assertAttrs(t, <-seen, map[string]string{"db.query.text": text, "db.system.name": "postgresql", "server.address": "127.0.0.1"})
	}
}

type samplerFunc func(sdktrace.SamplingParameters)

func (f samplerFunc) ShouldSample(p sdktrace.SamplingParameters) sdktrace.SamplingResult {
	f(p)
	return sdktrace.SamplingResult{Decision: sdktrace.Drop}
}
func (samplerFunc) Description() string { return "drop" }

// A statement without a lock call has no span and no measurement, also on a
// connection that holds a lock.
func TestNothingIsToldOfOtherStatements(t *testing.T) {
	k := tell(t, freshDSN(t))
	conn := k.conn(t)
	others := func() {
		exec(t, conn, "CREATE TABLE IF NOT EXISTS advisory (id int)")
		exec(t, conn, "INSERT INTO advisory VALUES ($1)", 1)
		exec(t, conn, "SELECT 'pg_advisory_lock(1)' -- pg_advisory_lock(2)")
		tx, err := conn.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tx.Exec("SELECT count(*) FROM advisory"); err != nil {
			t.Fatal(err)
		}
		if err := tx.Rollback(); err != nil {
			t.Fatal(err)
		}
		if _, err := conn.ExecContext(t.Context(), "SELECT 1/0"); err == nil {
			t.Fatal("no error")
		}
	}
	others()
	if m := k.collect(t); len(k.spans.GetSpans()) > 0 || len(m) != 3 { // connections, waiting, oldest
		t.Errorf("spans %v, metrics %v", names(k.spans.GetSpans()), m)
	}
	exec(t, conn, "SELECT pg_advisory_lock(42)")
	before := k.collect(t)
	others()
	after := k.collect(t)
	delete(before, "pgadvlock.locks.oldest{}")
	delete(after, "pgadvlock.locks.oldest{}")
	if n := names(k.spans.GetSpans()); len(n) != 1 || !maps.Equal(before, after) {
		t.Errorf("spans %v, metrics %v, then %v", n, before, after)
	}
	exec(t, conn, "SELECT pg_advisory_unlock(42)")
}

// A hold span ends in every way that a lock ends, and says how.
func TestHoldSpans(t *testing.T) {
	for _, c := range []struct {
		name, end string
		run       func(*told, *testing.T, *sql.Conn)
		opts      []pgadvlock.Option
	}{
		{"unlock", "unlocked", func(_ *told, t *testing.T, c *sql.Conn) {
			exec(t, c, "SELECT pg_advisory_lock(42)")
			exec(t, c, "SELECT pg_advisory_lock(42)")
			exec(t, c, "SELECT pg_advisory_unlock(42)")
			exec(t, c, "SELECT pg_advisory_unlock(42)")
		}, nil},
		{"unlock all", "unlocked", func(_ *told, t *testing.T, c *sql.Conn) {
			exec(t, c, "SELECT pg_advisory_lock(42)")
			exec(t, c, "SELECT pg_advisory_unlock_all()")
		}, nil},
		{"commit", "transaction_end", func(_ *told, t *testing.T, c *sql.Conn) {
			exec(t, c, "BEGIN")
			exec(t, c, "SELECT pg_advisory_xact_lock(42)")
			exec(t, c, "COMMIT")
		}, nil},
		{"rollback to", "transaction_end", func(_ *told, t *testing.T, c *sql.Conn) {
			exec(t, c, "BEGIN")
			exec(t, c, "SAVEPOINT a")
			exec(t, c, "SELECT pg_advisory_xact_lock(42)")
			exec(t, c, "ROLLBACK TO a")
		}, nil},
		{"rollback", "transaction_end", func(_ *told, t *testing.T, c *sql.Conn) {
			exec(t, c, "BEGIN")
			exec(t, c, "SELECT pg_try_advisory_xact_lock(42)")
			exec(t, c, "ROLLBACK")
		}, nil},
		{"commit of a Tx", "transaction_end", func(_ *told, t *testing.T, c *sql.Conn) {
			tx, err := c.BeginTx(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tx.Exec("SELECT pg_advisory_xact_lock(42)"); err != nil {
				t.Fatal(err)
			}
			if err := tx.Commit(); err != nil {
				t.Fatal(err)
			}
		}, nil},
		{"transaction whose context ended", "transaction_end", func(_ *told, t *testing.T, c *sql.Conn) {
			ctx, cancel := context.WithCancel(t.Context())
			tx, err := c.BeginTx(ctx, nil)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tx.Exec("SELECT pg_advisory_xact_lock(42)"); err != nil {
				t.Fatal(err)
			}
			cancel()
			c.Close() // waits for the rollback
		}, nil},
		{"discard all by hand", "unlocked", func(_ *told, t *testing.T, c *sql.Conn) {
			exec(t, c, "SELECT pg_advisory_lock(42)")
			exec(t, c, "DISCARD ALL")
		}, nil},
		{"return, close", "leaked", func(_ *told, t *testing.T, c *sql.Conn) {
			exec(t, c, "SELECT pg_advisory_lock(42)")
			c.Close()
		}, []pgadvlock.Option{pgadvlock.WithReset(pgadvlock.ResetClose)}},
		{"return after the close of the DB", "leaked", func(k *told, t *testing.T, c *sql.Conn) {
			exec(t, c, "SELECT pg_advisory_lock(42)")
			k.db.Close()
			c.Close()
		}, nil},
		{"panic in Raw", "leaked", func(_ *told, t *testing.T, c *sql.Conn) {
			exec(t, c, "SELECT pg_advisory_lock(42)")
			defer func() { _ = recover() }()
			_ = c.Raw(func(any) error { panic("no") })
		}, nil},
		{"context ended in another statement", "lost", func(_ *told, t *testing.T, c *sql.Conn) {
			exec(t, c, "SELECT pg_advisory_lock(42)")
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
			defer cancel()
			if _, err := c.ExecContext(ctx, "SELECT pg_sleep(10)"); err == nil {
				t.Fatal("no error")
			}
		}, nil},
		{"return", "leaked", func(_ *told, t *testing.T, c *sql.Conn) {
			exec(t, c, "SELECT pg_advisory_lock(42)")
			c.Close()
		}, nil},
		{"return, discard all", "leaked", func(_ *told, t *testing.T, c *sql.Conn) {
			exec(t, c, "SELECT pg_advisory_lock(42)")
			c.Close()
		}, []pgadvlock.Option{pgadvlock.WithReset(pgadvlock.ResetDiscardAll)}},
		{"terminated", "lost", func(k *told, t *testing.T, c *sql.Conn) {
			exec(t, c, "SELECT pg_advisory_lock(42)")
			var pid int
			if err := c.QueryRowContext(t.Context(), "SELECT pg_backend_pid()").Scan(&pid); err != nil {
				t.Fatal(err)
			}
			k.see.Exec("SELECT pg_terminate_backend($1, 5000)", pid)
			_, _ = c.ExecContext(t.Context(), "SELECT 1")
		}, nil},
		{"close of the DB", "lost", func(k *told, t *testing.T, c *sql.Conn) {
			exec(t, c, "SELECT pg_advisory_lock(42)")
			c.Close()
			k.db.Close()
		}, []pgadvlock.Option{pgadvlock.WithReset(pgadvlock.ResetOff)}},
	} {
		t.Run(c.name, func(t *testing.T) {
			k := tell(t, freshDSN(t), c.opts...)
			c.run(k, t, k.conn(t))
			held := k.span(t, "advisory lock held")
			assertAttrs(t, held.Attributes, map[string]string{"pgadvlock.end": c.end, "pgadvlock.key": "42", "pgadvlock.lock_mode": "exclusive"})
			if attr(held.Attributes, "code.file.path") == "" || held.SpanKind != trace.SpanKindInternal {
				t.Errorf("span %+v", held)
			}
			wait := k.spans.GetSpans()[slices.IndexFunc(k.spans.GetSpans(), func(s tracetest.SpanStub) bool { return strings.HasSuffix(s.Name, "_lock") })]
			if len(held.Links) != 1 || held.Links[0].SpanContext.SpanID() != wait.SpanContext.SpanID() {
				t.Errorf("links %+v", held.Links)
			}
			if n := slices.DeleteFunc(names(k.spans.GetSpans()), func(n string) bool { return n != "advisory lock held" }); len(n) != 1 {
				t.Errorf("%d hold spans", len(n))
			}
		})
	}
}

// A leak and a loss have no caller whose span could tell of them: each lock's own
// span does, with the key of that lock and the line that took it.
func TestFindingsAtTheReturnAreOnTheHoldSpans(t *testing.T) {
	for _, c := range []struct {
		name, event string
		run         func(*told, *testing.T, *sql.Conn)
		opts        []pgadvlock.Option
	}{
		{"leak", "leaked-session-lock", func(_ *told, _ *testing.T, c *sql.Conn) { c.Close() }, nil},
		{"leak, discard all", "leaked-session-lock", func(_ *told, _ *testing.T, c *sql.Conn) { c.Close() },
			[]pgadvlock.Option{pgadvlock.WithReset(pgadvlock.ResetDiscardAll)}},
		{"leak, close", "leaked-session-lock", func(_ *told, _ *testing.T, c *sql.Conn) { c.Close() },
			[]pgadvlock.Option{pgadvlock.WithReset(pgadvlock.ResetClose)}},
		{"leak in a transaction", "leaked-session-lock", func(_ *told, t *testing.T, c *sql.Conn) {
			exec(t, c, "BEGIN")
			c.Close()
		}, nil},
		{"leak, observed", "leaked-session-lock", func(k *told, t *testing.T, c *sql.Conn) {
			c.Close()
			exec(t, k.conn(t), "SELECT pg_advisory_unlock_all()")
		}, []pgadvlock.Option{pgadvlock.WithPreset(pgadvlock.PresetObserve)}},
		{"loss, at the return", "lost-lock", func(k *told, _ *testing.T, c *sql.Conn) {
			k.see.Exec("SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory' AND objid = 42")
			c.Close()
		}, nil},
		{"loss, at the next use", "lost-lock", func(k *told, t *testing.T, c *sql.Conn) {
			k.see.Exec("SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory' AND objid = 42")
			_, _ = c.ExecContext(t.Context(), "SELECT 1")
		}, nil},
		{"off", "", func(_ *told, _ *testing.T, c *sql.Conn) { c.Close() },
			[]pgadvlock.Option{pgadvlock.WithRule(pgadvlock.RuleLeakedSessionLock, pgadvlock.LevelOff)}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var inHandler trace.SpanContext
			k := tell(t, freshDSN(t), append(c.opts, pgadvlock.WithEventHandler(func(ctx context.Context, _ pgadvlock.Event) {
				inHandler = trace.SpanContextFromContext(ctx)
			}))...)
			k.db.SetMaxOpenConns(1)
			conn := k.conn(t)
			exec(t, conn, "SELECT pg_advisory_lock(42)")
			exec(t, conn, "SELECT pg_advisory_lock_shared(4, 2)")
			c.run(k, t, conn)
			holds := slices.DeleteFunc(k.spans.GetSpans(), func(s tracetest.SpanStub) bool { return s.Name != "advisory lock held" })
			if len(holds) != 2 {
				t.Fatalf("%d hold spans", len(holds))
			}
			for i, held := range holds {
				if c.event == "" {
					if len(held.Events) != 0 {
						t.Errorf("events %+v", held.Events)
					}
					continue
				}
				if len(held.Events) != 1 || held.Events[0].Name != "pgadvlock "+c.event {
					t.Fatalf("events %+v", held.Events)
				}
				want := map[string]string{"pgadvlock.rule": c.event, "pgadvlock.level": "warn"}
				for _, key := range []string{"pgadvlock.key", "code.line.number", "pgadvlock.backend_pid"} {
					want[key] = attr(held.Attributes, key)
				}
				assertAttrs(t, held.Events[0].Attributes, want)
				// whose span is in the context, for logs and the handler
				if i == 0 && !inHandler.Equal(held.SpanContext) {
					t.Errorf("the handler is given %v, not %v", inHandler, held.SpanContext)
				}
			}
		})
	}
}

// hiding is a middleware that does not forward driver.Validator.
type hiding struct{ driver.Connector }

type hidingConn struct {
	driver.Conn
	driver.QueryerContext
	driver.ExecerContext
	driver.SessionResetter
}

func (h hiding) Connect(ctx context.Context) (driver.Conn, error) {
	c, err := h.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return hidingConn{c, c.(driver.QueryerContext), c.(driver.ExecerContext), c.(driver.SessionResetter)}, nil
}

func TestAHiddenReturnIsOnTheHoldSpan(t *testing.T) {
	k := tell(t, freshDSN(t))
	c, ok := pgadvlock.ConnectorOf(k.db)
	if !ok {
		t.Fatal("no Connector")
	}
	db := sql.OpenDB(hiding{c})
	defer db.Close()
	for range 2 { // what the first leaves behind, the second finds
		conn, err := db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		exec(t, conn, "SELECT pg_advisory_lock(42)")
		conn.Close()
	}
	if e := k.span(t, "advisory lock held").Events; len(e) == 0 || e[0].Name != "pgadvlock return-hook-hidden" || attr(e[0].Attributes, "pgadvlock.key") != "42" {
		t.Errorf("events %+v", e)
	}
}

// A loss that a statement meets is told on its caller's span as well.
func TestALossIsAlsoOnTheCallersSpan(t *testing.T) {
	k := tell(t, freshDSN(t))
	conn := k.conn(t)
	exec(t, conn, "SELECT pg_advisory_lock(42)")
	k.see.Exec("SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory'")
	ctx, caller := k.tracer.Start(t.Context(), "caller")
	_, _ = conn.ExecContext(ctx, "SELECT 1")
	caller.End()
	for _, name := range []string{"caller", "advisory lock held"} {
		if e := k.span(t, name).Events; len(e) != 1 || e[0].Name != "pgadvlock lost-lock" || attr(e[0].Attributes, "pgadvlock.key") != "42" {
			t.Errorf("%s: events %+v", name, e)
		}
	}
}

// A handler that panics is survived, and counted.
func TestHandlerPanicsAreCounted(t *testing.T) {
	k := tell(t, freshDSN(t), pgadvlock.WithEventHandler(func(context.Context, pgadvlock.Event) { panic("no") }))
	for range 2 {
		conn := k.conn(t)
		exec(t, conn, "SELECT pg_advisory_lock(42)")
		conn.Close()
	}
	if m := k.collect(t); m["pgadvlock.handler_panics{}"] != 2 || m["pgadvlock.events{level=warn,rule=leaked-session-lock}"] != 2 {
		t.Errorf("metrics %v", m)
	}
}

// awaitLock runs a lock statement that waits until after has passed.
func awaitLock(t *testing.T, k *told, query string, after func()) {
	t.Helper()
	conn := k.conn(t)
	done := make(chan error, 1)
	go func() {
		_, err := conn.ExecContext(context.Background(), query)
		done <- err
	}()
	after()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// The wait span names the holder: the right one of several keys, share
// holders, bigint, pair and expression keys, and one on the same Connector,
// to which it is linked.
func TestBlockers(t *testing.T) {
	soon := pgadvlock.WithBlockerAfter(30 * time.Millisecond)
	for name, query := range map[string]string{
		"bigint": "pg_advisory_lock%s(42)", "negative": "pg_advisory_lock%s(-42)", "pair": "pg_advisory_lock%s(4, -2)",
		"expression": "pg_advisory_lock%s(hashtextextended('refunds', 0))", "transaction": "pg_advisory_xact_lock%s(42)",
	} {
		t.Run(name, func(t *testing.T) {
			k := tell(t, freshDSN(t), soon)
			other := pgtest.Observe(t, k.dsn)
			sessionQuery := strings.Replace(query, "xact_", "", 1)
			k.see.Exec("SELECT pg_advisory_lock(7), pg_advisory_lock(0, 42)") // not in the way
			k.see.Exec("SET application_name = 'the holder'")
			k.see.Exec("SELECT " + fmt.Sprintf(sessionQuery, "_shared"))
			other.Exec("SELECT " + fmt.Sprintf(sessionQuery, "_shared"))
			start := time.Now()
			awaitLock(t, k, "SELECT "+fmt.Sprintf(query, ""), func() {
				pgtest.Eventually(t, 5*time.Second, "the wait is long enough", func() bool { return time.Since(start) > 300*time.Millisecond })
				k.see.Exec("SELECT pg_advisory_unlock_all()")
				other.Exec("SELECT pg_advisory_unlock_all()")
			})
			span := k.span(t, strings.Split(query, "%s")[0])
			if len(span.Events) != 1 || span.Events[0].Name != "advisory lock blocked" {
				if name != "transaction" || len(span.Events) != 2 { // it is reported for autocommit as well
					t.Fatalf("events %+v", span.Events)
				}
			}
			e := span.Events[len(span.Events)-1]
			pids := attr(e.Attributes, "pgadvlock.holder.pid")
			if !strings.Contains(pids, fmt.Sprint(k.see.PID())) || !strings.Contains(pids, fmt.Sprint(other.PID())) || strings.Count(pids, ",") != 1 {
				t.Errorf("holders %s, want %d and %d", pids, k.see.PID(), other.PID())
			}
			for key, want := range map[string]string{"application_name": "the holder", "client_address": "127.0.0.1", "state": "idle", "since": "T", "lock_mode": "share"} {
				if got := attr(e.Attributes, "pgadvlock.holder."+key); !strings.Contains(got, want) {
					t.Errorf("holder %s: %s", key, got)
				}
			}
		})
	}
	t.Run("a chain", func(t *testing.T) {
		// The observer has 1, the middle has 2 and waits for 1, the last waits for 2.
		k := tell(t, freshDSN(t), soon)
		middle, last := k.conn(t), k.conn(t)
		exec(t, middle, "SELECT pg_advisory_lock(2)")
		k.see.Lock(1)
		var middlePID int
		if err := middle.QueryRowContext(t.Context(), "SELECT pg_backend_pid()").Scan(&middlePID); err != nil {
			t.Fatal(err)
		}
		waited := make(chan error, 2)
		wait := func(c *sql.Conn, key int64) {
			go func() {
				_, err := c.ExecContext(context.Background(), "SELECT pg_advisory_lock($1)", key)
				waited <- err
			}()
			pgtest.Eventually(t, 5*time.Second, "a waiter", func() bool { return k.see.Waiting(key) })
		}
		wait(middle, 1)
		wait(last, 2)
		pgtest.Eventually(t, 5*time.Second, "both have asked", func() bool { return k.collect(t)["pgadvlock.blocker_lookups{result=ok}"] == 2 })
		k.see.Unlock(1)
		if err := <-waited; err != nil {
			t.Fatal(err)
		}
		exec(t, middle, "SELECT pg_advisory_unlock(2)")
		if err := <-waited; err != nil {
			t.Fatal(err)
		}
		holders := map[string]string{}
		for _, s := range k.spans.GetSpans() {
			for _, e := range s.Events {
				if e.Name == "advisory lock blocked" {
					holders[attr(s.Attributes, "pgadvlock.key")] = attr(e.Attributes, "pgadvlock.holder.pid") + attr(e.Attributes, "pgadvlock.holder.state")
				}
			}
		}
		want := map[string]string{"1": fmt.Sprintf(`[%d]["idle"]`, k.see.PID()), "2": fmt.Sprintf(`[%d]["active"]`, middlePID)}
		if !maps.Equal(holders, want) {
			t.Errorf("holders by key: %v, want %v", holders, want)
		}
	})
	t.Run("on the same Connector", func(t *testing.T) {
		k := tell(t, freshDSN(t), soon)
		k.db.SetMaxOpenConns(2) // exhausted: the lookup needs none of the pool
		holder := k.conn(t)
		exec(t, holder, "SELECT pg_advisory_lock(hashtextextended('refunds', 0))")
		start := time.Now()
		awaitLock(t, k, "SELECT pg_advisory_lock(hashtextextended('refunds', 0))", func() {
			pgtest.Eventually(t, 5*time.Second, "the wait is long enough", func() bool { return time.Since(start) > 300*time.Millisecond })
			exec(t, holder, "SELECT pg_advisory_unlock_all()")
		})
		if m := k.collect(t); m["pgadvlock.blocker_lookups{result=ok}"] != 1 {
			t.Errorf("metrics %v", m)
		}
		wait, held := k.span(t, "pg_advisory_lock"), k.span(t, "advisory lock held")
		if len(wait.Links) != 1 || wait.Links[0].SpanContext.SpanID() != held.SpanContext.SpanID() {
			t.Errorf("links %+v", wait.Links)
		}
		if len(held.Events) != 1 || held.Events[0].Name != "advisory lock wanted" || attr(held.Events[0].Attributes, "pgadvlock.waiter.pid") == "" {
			t.Errorf("events %+v", held.Events)
		}
	})
	t.Run("a role that may not look", func(t *testing.T) {
		server := pgtest.Shared(t)
		db := server.NewDB(t)
		role := "poor_" + db[len(db)-8:]
		if err := server.Exec(db, "CREATE ROLE "+role+" LOGIN"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = server.Exec("postgres", "DROP ROLE "+role) })
		k := tell(t, strings.Replace(server.DSN(db), "://postgres@", "://"+role+"@", 1), soon, pgadvlock.WithWaitWarning(50*time.Millisecond))
		holder := pgtest.Observe(t, server.DSN(db))
		holder.Lock(42)
		start := time.Now()
		awaitLock(t, k, "SELECT pg_advisory_lock(42)", func() {
			pgtest.Eventually(t, 5*time.Second, "the wait is long enough", func() bool { return time.Since(start) > 400*time.Millisecond })
			holder.Unlock(42)
		})
		e := k.span(t, "pg_advisory_lock").Events
		if len(e) == 0 || attr(e[0].Attributes, "pgadvlock.holder.pid") != fmt.Sprintf("[%d]", holder.PID()) || attr(e[0].Attributes, "pgadvlock.holder.state") != `[""]` {
			t.Errorf("events %+v", e)
		}
		if len(k.events) != 1 || !strings.Contains(fmt.Sprint(k.events[0].Err), "not visible to this role") {
			t.Errorf("events %+v", k.events)
		}
		k.db.Close()
	})
}

// long-wait: judged once a wait, naming the holders.
func TestLongWait(t *testing.T) {
	k := tell(t, freshDSN(t), pgadvlock.WithWaitWarning(50*time.Millisecond), pgadvlock.WithTracerProvider(sdktrace.NewTracerProvider(sdktrace.WithSampler(sdktrace.NeverSample()))))
	k.see.Lock(42)
	start := time.Now()
	awaitLock(t, k, "SELECT pg_advisory_lock(42)", func() {
		pgtest.Eventually(t, 5*time.Second, "the wait is long enough", func() bool { return time.Since(start) > 400*time.Millisecond })
		k.see.Unlock(42)
	})
	if len(k.events) != 1 || k.events[0].Rule != pgadvlock.RuleLongWait || k.events[0].Locks[0].Key.String() != "42" ||
		!strings.Contains(fmt.Sprint(k.events[0].Err), fmt.Sprintf("held by pid %d (pgtest observer)", k.see.PID())) || k.events[0].Caller.Line == 0 {
		t.Errorf("events %+v", k.events)
	}
}

// collect reads all metrics, as name{attributes} -> value.
func (k *told) collect(t *testing.T) map[string]float64 {
	t.Helper()
	var data metricdata.ResourceMetrics
	if err := k.reader.Collect(context.Background(), &data); err != nil {
		t.Fatal(err)
	}
	values := map[string]float64{}
	name := func(m metricdata.Metrics, set attribute.Set) string {
		var own []string
		for _, a := range set.ToSlice() {
			if strings.HasPrefix(string(a.Key), "pgadvlock.") {
				own = append(own, strings.TrimPrefix(string(a.Key), "pgadvlock.")+"="+a.Value.Emit())
			}
		}
		return m.Name + "{" + strings.Join(own, ",") + "}"
	}
	for _, scope := range data.ScopeMetrics {
		for _, m := range scope.Metrics {
			switch d := m.Data.(type) {
			case metricdata.Sum[int64]:
				for _, p := range d.DataPoints {
					values[name(m, p.Attributes)] += float64(p.Value)
				}
			case metricdata.Gauge[float64]:
				for _, p := range d.DataPoints {
					values[name(m, p.Attributes)] = p.Value
				}
			case metricdata.Histogram[float64]:
				for _, p := range d.DataPoints {
					values[name(m, p.Attributes)+"count"] += float64(p.Count)
					if last := p.Bounds[len(p.Bounds)-1]; last != 300 {
						t.Errorf("%s: buckets to %v", m.Name, last)
					}
				}
			}
		}
	}
	return values
}

func TestMetrics(t *testing.T) {
	k := tell(t, freshDSN(t))
	a, b := k.conn(t), k.conn(t)
	exec(t, a, "SELECT pg_advisory_lock(1)")
	exec(t, a, "SELECT pg_advisory_lock(1)")
	exec(t, a, "SELECT pg_advisory_lock_shared(2)")
	exec(t, b, "SELECT pg_try_advisory_lock(0, 3)")
	exec(t, b, "BEGIN")
	exec(t, b, "SELECT pg_advisory_xact_lock(4)")
	exec(t, b, "SELECT pg_advisory_unlock(99)")

	m := k.collect(t)
	for key, want := range map[string]float64{
		"pgadvlock.locks.held{lock_mode=exclusive,scope=session}":                              2,
		"pgadvlock.locks.held{lock_mode=share,scope=session}":                                  1,
		"pgadvlock.locks.held{lock_mode=exclusive,scope=transaction}":                          1,
		"pgadvlock.locks.waiting{}":                                                            0,
		"pgadvlock.connections{pool_mode=direct}":                                              2,
		"pgadvlock.wait.duration{lock_mode=exclusive,outcome=acquired,scope=session}count":     2,
		"pgadvlock.wait.duration{lock_mode=share,outcome=acquired,scope=session}count":         1,
		"pgadvlock.wait.duration{lock_mode=exclusive,outcome=acquired,scope=transaction}count": 1,
		"pgadvlock.events{level=warn,rule=unlock-not-held}":                                    1,
	} {
		if m[key] != want {
			t.Errorf("%s is %v, want %v", key, m[key], want)
		}
	}
	if held := len(k.see.Locks()); held != 4 {
		t.Errorf("pg_locks has %d", held)
	}
	if age := m["pgadvlock.locks.oldest{}"]; age <= 0 || age > 60 {
		t.Errorf("the oldest is %vs old", age)
	}

	waited := make(chan error, 1)
	go func() {
		_, err := k.conn(t).ExecContext(context.Background(), "SELECT pg_advisory_lock(1)")
		waited <- err
	}()
	pgtest.Eventually(t, 5*time.Second, "a waiter", func() bool { return k.see.Waiting(1) })
	if m := k.collect(t); m["pgadvlock.locks.waiting{}"] != 1 {
		t.Errorf("waiting: %v", m)
	}
	exec(t, b, "COMMIT")
	a.Close()
	if err := <-waited; err != nil {
		t.Fatal(err)
	}
	m = k.collect(t)
	for key, want := range map[string]float64{
		"pgadvlock.hold.duration{end=leaked,lock_mode=exclusive,scope=session}count":              1,
		"pgadvlock.hold.duration{end=leaked,lock_mode=share,scope=session}count":                  1,
		"pgadvlock.hold.duration{end=transaction_end,lock_mode=exclusive,scope=transaction}count": 1,
		"pgadvlock.resets{reset=unlock_all,result=ok}":                                            1,
		"pgadvlock.events{level=warn,rule=leaked-session-lock}":                                   1,
	} {
		if m[key] != want {
			t.Errorf("%s is %v, want %v", key, m[key], want)
		}
	}
	if locks := k.see.Locks(); m["pgadvlock.locks.held{lock_mode=exclusive,scope=session}"] != 2 || len(locks) != 2 {
		t.Errorf("held %v, pg_locks has %v", m, locks)
	}
	k.db.Close()
	m = k.collect(t)
	for _, observed := range []string{"pgadvlock.connections{pool_mode=direct}", "pgadvlock.locks.waiting{}", "pgadvlock.locks.oldest{}"} {
		if v, ok := m[observed]; ok {
			t.Errorf("after Close %s is observed, as %v", observed, v)
		}
	}
}

// pools reads one metric, by the name of the pool; every point must have one.
func pools(t *testing.T, reader *sdkmetric.ManualReader, metric string) map[string]float64 {
	t.Helper()
	var data metricdata.ResourceMetrics
	if err := reader.Collect(context.Background(), &data); err != nil {
		t.Fatal(err)
	}
	values := map[string]float64{}
	add := func(name string, set attribute.Set, value float64) {
		pool, ok := set.Value("db.client.connection.pool.name")
		if !ok {
			t.Errorf("%s: no pool name in %v", name, set.ToSlice())
		}
		if name == metric {
			values[pool.AsString()] += value
		}
	}
	for _, scope := range data.ScopeMetrics {
		for _, m := range scope.Metrics {
			switch d := m.Data.(type) {
			case metricdata.Sum[int64]:
				for _, p := range d.DataPoints {
					add(m.Name, p.Attributes, float64(p.Value))
				}
			case metricdata.Gauge[float64]:
				for _, p := range d.DataPoints {
					add(m.Name, p.Attributes, p.Value)
				}
			case metricdata.Histogram[float64]:
				for _, p := range d.DataPoints {
					add(m.Name, p.Attributes, float64(p.Count))
				}
			}
		}
	}
	return values
}

// Connectors on one database do not hide each other's locks: each has a name of
// its own, which is free again when it is closed.
func TestEachConnectorIsMeasured(t *testing.T) {
	reader := sdkmetric.NewManualReader()
	meters := pgadvlock.WithMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader)))
	dsn := freshDSN(t)
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	first, second := u.Host+u.Path, u.Host+u.Path+"#2" // server.address:server.port/db.namespace
	a, b := tell(t, dsn, meters), tell(t, dsn, meters)
	if m := pools(t, reader, "pgadvlock.connections"); len(m) != 0 {
		t.Errorf("before there is a connection: %v", m)
	}
	holder := a.conn(t)
	exec(t, holder, "SELECT pg_advisory_lock(42)")
	exec(t, b.conn(t), "SELECT pg_advisory_xact_lock(43)")
	assert := func(metric string, want map[string]float64) {
		t.Helper()
		if got := pools(t, reader, metric); !maps.Equal(got, want) {
			t.Errorf("%s: %v, want %v", metric, got, want)
		}
	}
	oldest := pools(t, reader, "pgadvlock.locks.oldest")
	if len(oldest) != 2 || oldest[first] <= 0 || oldest[second] != 0 {
		t.Errorf("the oldest: %v", oldest)
	}
	assert("pgadvlock.locks.held", map[string]float64{first: 1})
	assert("pgadvlock.locks.waiting", map[string]float64{first: 0, second: 0})
	assert("pgadvlock.connections", map[string]float64{first: 1, second: 1})
	assert("pgadvlock.wait.duration", map[string]float64{first: 1, second: 1})

	for range 3 { // one after the other they are the same pool
		b.db.Close()
		assert("pgadvlock.connections", map[string]float64{first: 1})
		b = tell(t, dsn, meters)
		b.conn(t)
		assert("pgadvlock.connections", map[string]float64{first: 1, second: 1})
	}
	exec(t, holder, "SELECT pg_advisory_unlock(42)")
	holder.Close()
	a.db.Close()
	a.db.Close()
	c := tell(t, dsn, meters)
	c.conn(t)
	assert("pgadvlock.connections", map[string]float64{first: 1, second: 1})
}

// A name that was given is used, and still tells two Connectors apart.
func TestPoolName(t *testing.T) {
	reader := sdkmetric.NewManualReader()
	meters := pgadvlock.WithMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader)))
	dsn := freshDSN(t)
	name := "worker/" + t.Name()
	tell(t, dsn, meters, pgadvlock.WithPoolName(name)).conn(t)
	t.Setenv("PGADVLOCK_POOL_NAME", name)
	tell(t, dsn, meters).conn(t)
	if m := pools(t, reader, "pgadvlock.connections"); !maps.Equal(m, map[string]float64{name: 1, name + "#2": 1}) {
		t.Errorf("%v", m)
	}
}

// Whatever was done, at a quiet moment the gauges are what pg_locks says.
func TestGaugesAreWhatPgLocksSays(t *testing.T) {
	k := tell(t, freshDSN(t), pgadvlock.WithRule(pgadvlock.RulePooledSessionLock, pgadvlock.LevelOff))
	random := rand.New(rand.NewPCG(1, uint64(time.Now().UnixNano())))
	conns := make([]*sql.Conn, 3)
	open := make([]bool, len(conns)) // in a transaction
	key := func() int { return random.IntN(4) }
	var done []string
	for step := range 300 {
		i := random.IntN(len(conns))
		if conns[i] == nil {
			conns[i] = k.conn(t)
		}
		var query string
		switch random.IntN(11) {
		case 0, 1:
			query = fmt.Sprintf("SELECT pg_try_advisory_lock(%d)", key())
		case 2:
			query = fmt.Sprintf("SELECT pg_try_advisory_lock_shared(1, %d)", key())
		case 3:
			query = fmt.Sprintf("SELECT pg_advisory_lock_shared(%d)", 10+key())
		case 4, 5:
			query = fmt.Sprintf("SELECT pg_advisory_unlock(%d), pg_advisory_unlock_shared(1, %d)", key(), key())
		case 6:
			query = "SELECT pg_advisory_unlock_all()"
		case 7, 8: // keys of their own: pg_locks has one row for both scopes
			query = fmt.Sprintf("SELECT pg_try_advisory_xact_lock(2, %d)", key())
		case 9:
			query, open[i] = map[bool]string{false: "BEGIN", true: "ROLLBACK"}[open[i]], !open[i]
		case 10:
			query, open[i] = "return", false
		}
		done = append(done, fmt.Sprint(i, ": ", query))
		if query == "return" {
			conns[i].Close()
			conns[i] = nil
		} else {
			exec(t, conns[i], query)
		}
		if step%5 != 0 {
			continue
		}
		want, got := map[string]float64{}, k.collect(t)
		for _, l := range k.see.Locks() {
			scope := "session"
			if a, _, ok := l.Pair(); ok && a == 2 {
				scope = "transaction"
			}
			want[fmt.Sprintf("pgadvlock.locks.held{lock_mode=%s,scope=%s}", strings.ToLower(strings.TrimSuffix(l.Mode, "Lock")), scope)]++
		}
		oldest := got["pgadvlock.locks.oldest{}"]
		waiting := got["pgadvlock.locks.waiting{}"]
		maps.DeleteFunc(got, func(name string, _ float64) bool { return !strings.HasPrefix(name, "pgadvlock.locks.held") })
		session := want["pgadvlock.locks.held{lock_mode=exclusive,scope=session}"] + want["pgadvlock.locks.held{lock_mode=share,scope=session}"]
		if !maps.Equal(want, got) || waiting != 0 || (oldest > 0) != (session > 0) {
			t.Fatalf("pg_locks %v, gauges %v, %v waiting, the oldest %v; after\n%s", want, got, waiting, oldest, strings.Join(done, "\n"))
		}
	}
}

// However many keys, the number of time series is the same.
func TestMetricsAreBounded(t *testing.T) {
	k := tell(t, freshDSN(t))
	c := k.conn(t)
	run := func(from, to int) int {
		for i := from; i < to; i++ {
			exec(t, c, "SELECT pg_advisory_lock($1)", i)
			exec(t, c, "SELECT pg_advisory_unlock($1)", i)
		}
		return len(k.collect(t))
	}
	if few, many := run(0, 5), run(5, 500); few != many {
		t.Errorf("%d series, then %d", few, many)
	}
}

// A lookup that fails disturbs nothing, and is counted.
func TestFailingBlockerLookup(t *testing.T) {
	server := pgtest.Private(t, "max_connections=8", "superuser_reserved_connections=0")
	k := tell(t, server.DSN("postgres"), pgadvlock.WithBlockerAfter(30*time.Millisecond))
	k.see.Lock(42)
	if err := k.db.PingContext(t.Context()); err != nil { // the waiter's connection
		t.Fatal(err)
	}
	var spare []*pgx.Conn
	for { // until there is none left for the lookup
		c, err := pgx.Connect(context.Background(), k.dsn)
		if err != nil {
			break
		}
		spare = append(spare, c)
	}
	start := time.Now()
	awaitLock(t, k, "SELECT pg_advisory_lock(42)", func() {
		pgtest.Eventually(t, 5*time.Second, "the wait is long enough", func() bool { return time.Since(start) > 300*time.Millisecond })
		k.see.Unlock(42)
	})
	for _, c := range spare {
		c.Close(context.Background())
	}
	if m := k.collect(t); m["pgadvlock.blocker_lookups{result=failed}"] != 1 {
		t.Errorf("metrics %v", m)
	}
}

// Waiting on 72707369 behind a stranded holder, and nothing said who it was.
func TestIssue_prisma12999_8038_umami2999(t *testing.T) {
	k := tell(t, freshDSN(t), pgadvlock.WithBlockerAfter(30*time.Millisecond))
	k.see.Exec("SET application_name = 'stranded migration'")
	k.see.Exec("BEGIN")
	k.see.Lock(72707369)
	start := time.Now()
	awaitLock(t, k, "SELECT pg_advisory_lock(72707369)", func() {
		pgtest.Eventually(t, 5*time.Second, "the wait is long enough", func() bool { return time.Since(start) > 300*time.Millisecond })
		k.see.Unlock(72707369)
	})
	e := k.span(t, "pg_advisory_lock").Events
	if len(e) != 1 {
		t.Fatalf("events %+v", e)
	}
	assertAttrs(t, e[0].Attributes, map[string]string{
		"pgadvlock.holder.pid":              fmt.Sprintf("[%d]", k.see.PID()),
		"pgadvlock.holder.application_name": `["stranded migration"]`,
		"pgadvlock.holder.state":            `["idle in transaction"]`,
	})
	if since := attr(e[0].Attributes, "pgadvlock.holder.since"); !strings.HasPrefix(since, `["20`) {
		t.Errorf("since %s", since)
	}
}

// Leaked locks exhaust the pool, unseen: held and waiting locks and the age of
// the oldest are metrics.
func TestIssue_postHog66932_liquibase872(t *testing.T) {
	k := tell(t, freshDSN(t), pgadvlock.WithPreset(pgadvlock.PresetObserve))
	c := k.conn(t)
	exec(t, c, "SELECT pg_advisory_lock(42)")
	c.Close() // and it stays with the idle connection
	waiter := k.conn(t)
	exec(t, waiter, "SELECT pg_advisory_unlock_all()")
	exec(t, k.conn(t), "SELECT pg_advisory_lock(43)")
	m := k.collect(t)
	if m["pgadvlock.locks.held{lock_mode=exclusive,scope=session}"] != float64(len(k.see.Locks())) || m["pgadvlock.locks.oldest{}"] <= 0 || m["pgadvlock.events{level=warn,rule=leaked-session-lock}"] != 1 {
		t.Errorf("metrics %v, locks %v", m, k.see.Locks())
	}
}
