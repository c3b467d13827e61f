package pgadvlock

// This file owns the spans. It decides nothing: it is told what was sent and
// what came back.

import (
	"context"
	"errors"
	"net"
	"runtime/debug"
	"strconv"
	"sync"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/pgadvlock/pgadvlock/internal/ledger"
	"github.com/pgadvlock/pgadvlock/internal/locksql"
)

// Attributes of our own, beside OpenTelemetry's database conventions.
const (
	attrKey        = attribute.Key("pgadvlock.key")
	attrKeySpace   = attribute.Key("pgadvlock.key_space")
	attrLockMode   = attribute.Key("pgadvlock.lock_mode")
	attrScope      = attribute.Key("pgadvlock.scope")
	attrBlocking   = attribute.Key("pgadvlock.blocking")
	attrOutcome    = attribute.Key("pgadvlock.outcome")
	attrReentrant  = attribute.Key("pgadvlock.reentrant")
	attrBackendPID = attribute.Key("pgadvlock.backend_pid")
	attrPoolMode   = attribute.Key("pgadvlock.pool_mode")
	attrRule       = attribute.Key("pgadvlock.rule")
	attrLevel      = attribute.Key("pgadvlock.level")
)

const opaqueSpan = "advisory lock"

// version is the version of this module in the program's build.
var version = sync.OnceValue(func() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	if info.Main.Path == thisPackage {
		return info.Main.Version
	}
	for _, dep := range info.Deps {
		if dep.Path == thisPackage {
			return dep.Version
		}
	}
	return ""
})

func newTracer(s *settings) trace.Tracer {
	provider := s.tracerProvider
	if provider == nil {
		provider = otel.GetTracerProvider()
	}
	return provider.Tracer(thisPackage, trace.WithInstrumentationVersion(version()), trace.WithSchemaURL(semconv.SchemaURL))
}

// waitSpan is the span of one lock statement, from before the send to the
// answer.
type waitSpan struct {
	trace.Span
	conn      *Conn
	reentrant bool
}

// spanStarts are the start options of a connection's spans, by function. They
// are made once, so that a lock call allocates nothing for a span that nobody
// records.
type spanStarts map[string][]trace.SpanStartOption

func (c *Conn) spanStart(name string) []trace.SpanStartOption {
	if start, ok := c.starts[name]; ok {
		return start
	}
	attrs := []attribute.KeyValue{semconv.DBSystemNamePostgreSQL, semconv.DBQuerySummary("SELECT " + name)}
	if c.pgx != nil {
		cfg := c.pgx.Config()
		host, port := cfg.Host, int(cfg.Port)
		if remote, ok := c.pgx.PgConn().Conn().RemoteAddr().(*net.TCPAddr); ok && len(cfg.Fallbacks) > 0 {
			host, port = remote.IP.String(), remote.Port // the host of the config may not be the one that answered
		}
		attrs = append(attrs, semconv.DBNamespace(cfg.Database), semconv.ServerAddress(host), semconv.ServerPort(port))
	}
	start := []trace.SpanStartOption{trace.WithSpanKind(trace.SpanKindClient), trace.WithAttributes(attrs...)}
	if c.starts == nil {
		c.starts = spanStarts{}
	}
	c.starts[name] = start
	return start
}

// startWait starts the span of a plain lock statement, named after its first
// function.
func (c *Conn) startWait(ctx context.Context, st *locksql.Statement, attempts []ledger.Attempt[origin]) (context.Context, waitSpan) {
	name := st.Calls[0].Func.String()
	ctx, span := c.connector.tracer.Start(ctx, name, c.spanStart(name)...)
	w := waitSpan{Span: span, conn: c}
	if !span.IsRecording() {
		return ctx, w
	}
	var keys, spaces, modes, scopes []string
	blocking := false
	for _, at := range attempts {
		l := attemptedLock(at)
		blocking = blocking || at.Func.Blocking()
		if at.Func != locksql.UnlockAll {
			w.reentrant = w.reentrant || !at.Func.Release() && c.ledger.Count(at) > 0
			keys = append(keys, l.Key.String())
			spaces = append(spaces, at.Key.Space.String())
			modes = append(modes, l.Mode.String())
		}
		scopes = append(scopes, l.Scope.String())
	}
	setText(span, attrKey, keys)
	setText(span, attrKeySpace, spaces)
	setText(span, attrLockMode, modes)
	setText(span, attrScope, scopes)
	span.SetAttributes(attrBlocking.Bool(blocking))
	return ctx, w
}

// setText sets one text, or an array when the statement has several calls.
func setText(span trace.Span, key attribute.Key, values []string) {
	switch len(values) {
	case 0:
	case 1:
		span.SetAttributes(key.String(values[0]))
	default:
		span.SetAttributes(key.StringSlice(values))
	}
}

// end ends the span with what the server answered.
func (w waitSpan) end(attempts []ledger.Attempt[origin], answers []ledger.Answer, err error) {
	if err != nil {
		w.fail(err)
		return
	}
	if !w.IsRecording() {
		w.End()
		return
	}
	outcomes := make([]string, len(attempts))
	for i, at := range attempts {
		outcomes[i] = outcome(at.Func, answers[i])
	}
	setText(w.Span, attrOutcome, outcomes)
	w.SetAttributes(attrReentrant.Bool(w.reentrant))
	w.finish()
}

func (w waitSpan) finish() {
	w.SetAttributes(attrBackendPID.Int64(int64(w.conn.backendPID.Load())), attrPoolMode.String(w.conn.poolMode().String()))
	w.End()
}

// refuse ends the span of a statement that a rule kept from being sent.
func (w waitSpan) refuse(err error) {
	if w.Span == nil {
		return
	}
	if w.IsRecording() {
		w.SetAttributes(attrOutcome.String("refused"))
		var r *RuleError
		if errors.As(err, &r) {
			w.SetAttributes(attrRule.String(string(r.Event.Rule)), semconv.ErrorTypeKey.String(string(r.Event.Rule)))
			w.SetStatus(codes.Error, string(r.Event.Rule))
		}
	}
	w.finish()
}

// fail ends the span with an error. A PostgreSQL error's text may quote an
// argument, so only its SQLSTATE is told.
func (w waitSpan) fail(err error) {
	if !w.IsRecording() {
		w.End()
		return
	}
	state := sqlState(err)
	word := "error"
	switch {
	case state == "55P03":
		word = "timeout"
	case state == "57014", errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		word = "canceled"
	case state == "40P01":
		word = "deadlock"
	}
	w.SetAttributes(attrOutcome.String(word))
	if state != "" {
		w.SetAttributes(semconv.DBResponseStatusCode(state), semconv.ErrorTypeKey.String(state))
		w.SetStatus(codes.Error, "SQLSTATE "+state)
	} else {
		w.SetAttributes(semconv.ErrorType(err))
		w.SetStatus(codes.Error, word)
	}
	w.finish()
}

func outcome(f locksql.Func, a ledger.Answer) string {
	switch {
	case a == ledger.Unknown:
		return "unknown"
	case f.Release() && a == ledger.Yes:
		return "released"
	case f.Release():
		return "not_held"
	case a == ledger.Yes:
		return "acquired"
	}
	return "not_acquired"
}

// startOpaque starts the one span of a statement whose calls are not counted.
// For a statement without a call there is none.
func (c *Conn) startOpaque(ctx context.Context, st *locksql.Statement) waitSpan {
	if st.Form == locksql.NoCall {
		return waitSpan{}
	}
	_, span := c.connector.tracer.Start(ctx, opaqueSpan, c.spanStart(opaqueSpan)...)
	return waitSpan{Span: span, conn: c}
}

func (w waitSpan) endOpaque(err error) {
	switch {
	case w.Span == nil:
	case err != nil:
		w.fail(err)
	default:
		w.SetAttributes(attrOutcome.String("unknown"))
		w.finish()
	}
}

// addSpanEvent puts a rule's finding on the caller's span.
func addSpanEvent(ctx context.Context, e Event) {
	span := trace.SpanFromContext(ctx)
	if !span.IsRecording() {
		return
	}
	attrs := []attribute.KeyValue{attrRule.String(string(e.Rule)), attrLevel.String(e.Level.String()), semconv.CodeFilePath(e.Caller.File), semconv.CodeLineNumber(e.Caller.Line), semconv.CodeFunctionName(e.Caller.Function)}
	if len(e.Locks) > 0 {
		attrs = append(attrs, attrKey.String(e.Locks[0].Key.String()))
	}
	if e.BackendPID != 0 {
		attrs = append(attrs, attribute.Key(attrBackendPID).String(strconv.FormatUint(uint64(e.BackendPID), 10)))
	}
	span.AddEvent("pgadvlock "+string(e.Rule), trace.WithAttributes(attrs...))
}
