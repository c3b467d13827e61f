package pgadvlock

// This file owns the spans. It decides nothing: it is told what was sent and
// what came back.

import (
	"context"
	"database/sql/driver"
	"errors"
	"net"
	"runtime/debug"
	"slices"
	"sync"
	"time"

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
	attrEnd        = attribute.Key("pgadvlock.end")
	attrReset      = attribute.Key("pgadvlock.reset")
	attrResult     = attribute.Key("pgadvlock.result")

	// of the events that tell of a wait
	attrHolderPID   = attribute.Key("pgadvlock.holder.pid")
	attrHolderApp   = attribute.Key("pgadvlock.holder.application_name")
	attrHolderAddr  = attribute.Key("pgadvlock.holder.client_address")
	attrHolderState = attribute.Key("pgadvlock.holder.state")
	attrHolderSince = attribute.Key("pgadvlock.holder.since")
	attrHolderMode  = attribute.Key("pgadvlock.holder.lock_mode")
	attrWaiterPID   = attribute.Key("pgadvlock.waiter.pid")
)

// The names of spans that are not named after a function, and of span events.
const (
	opaqueSpan   = "advisory lock"
	holdSpan     = "advisory lock held"
	blockedEvent = "advisory lock blocked"
	wantedEvent  = "advisory lock wanted"
)

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
	ctx       context.Context // the caller's, for what comes of the wait
	began     time.Time
	attempts  []ledger.Attempt[origin]
	reentrant bool
}

// spanOptions are the start options of a span, with what a sampler should see.
// They are made once for each name, so that a lock call allocates nothing for a
// span that nobody records.
func (c *Conn) spanOptions(name, query string) []trace.SpanStartOption {
	options, ok := c.starts[name]
	if !ok {
		options = c.newSpanOptions(name)
	}
	if !c.connector.settings.queryText { // it may hold what nobody should read
		return options
	}
	return append(slices.Clip(options), trace.WithAttributes(semconv.DBQueryText(query)))
}

func (c *Conn) newSpanOptions(name string) []trace.SpanStartOption {
	summary := "SELECT " + name
	if name == opaqueSpan {
		summary = name // it may be any statement
	}
	attrs := append(c.serverAttributes(), semconv.DBQuerySummary(summary))
	options := []trace.SpanStartOption{trace.WithSpanKind(trace.SpanKindClient), trace.WithAttributes(attrs...)}
	if c.starts == nil {
		c.starts = map[string][]trace.SpanStartOption{}
	}
	c.starts[name] = options
	return options
}

// serverAttributes say which server and database a connection leads to.
func (c *Conn) serverAttributes() []attribute.KeyValue {
	attrs := []attribute.KeyValue{semconv.DBSystemNamePostgreSQL}
	if c.pgx == nil {
		return attrs
	}
	cfg := c.pgx.Config()
	host, port := cfg.Host, int(cfg.Port)
	if remote, ok := c.pgx.PgConn().Conn().RemoteAddr().(*net.TCPAddr); ok && len(cfg.Fallbacks) > 0 {
		host, port = remote.IP.String(), remote.Port // the host of the config may not be the one that answered
	}
	return append(attrs, semconv.DBNamespace(cfg.Database), semconv.ServerAddress(host), semconv.ServerPort(port))
}

// startWait starts the span of a plain lock statement, named after its first
// function.
func (c *Conn) startWait(ctx context.Context, attempts []ledger.Attempt[origin], query string) (context.Context, waitSpan) {
	name := attempts[0].Func.String()
	spanCtx, span := c.connector.tracer.Start(ctx, name, c.spanOptions(name, query)...)
	w := waitSpan{Span: span, conn: c, ctx: ctx, began: attempts[0].Origin.since, attempts: attempts}
	if span.IsRecording() {
		w.reentrant = slices.ContainsFunc(attempts, func(at ledger.Attempt[origin]) bool {
			return !at.Func.Release() && c.ledger.Count(at) > 0
		})
	}
	return spanCtx, w
}

// appendCalls appends what is to be said of the calls: of several in arrays.
func (w waitSpan) appendCalls(attrs []attribute.KeyValue) []attribute.KeyValue {
	switch len(w.attempts) {
	case 0: // they are not counted
		return attrs
	case 1:
		at := w.attempts[0]
		if at.Func != locksql.UnlockAll {
			attrs = append(attrs, attrKey.String(at.Key.String()), attrKeySpace.String(at.Key.Space.String()), attrLockMode.String(modeOf(at.Func.Share()).String()))
		}
		return append(attrs, attrScope.String(scopeOf(!at.Func.Session()).String()), attrBlocking.Bool(at.Func.Blocking()))
	}
	var keys, spaces, modes, scopes []string
	blocking := false
	for _, at := range w.attempts {
		blocking = blocking || at.Func.Blocking()
		if at.Func != locksql.UnlockAll {
			keys = append(keys, at.Key.String())
			spaces = append(spaces, at.Key.Space.String())
			modes = append(modes, modeOf(at.Func.Share()).String())
		}
		scopes = append(scopes, scopeOf(!at.Func.Session()).String())
	}
	if len(keys) > 0 {
		attrs = append(attrs, attrKey.StringSlice(keys), attrKeySpace.StringSlice(spaces), attrLockMode.StringSlice(modes))
	}
	return append(attrs, attrScope.StringSlice(scopes), attrBlocking.Bool(blocking))
}

// end ends the span with what the server answered.
func (w waitSpan) end(answers []ledger.Answer, err error) {
	if err != nil {
		w.fail(err)
		return
	}
	w.conn.connector.metrics.waited(w.ctx, w.began, w.attempts, func(i int) string { return outcome(w.attempts[i].Func, answers[i]) })
	if !w.IsRecording() {
		w.End()
		return
	}
	said := attrOutcome.String(outcome(w.attempts[0].Func, answers[0]))
	if len(answers) > 1 {
		outcomes := make([]string, len(answers))
		for i, at := range w.attempts {
			outcomes[i] = outcome(at.Func, answers[i])
		}
		said = attrOutcome.StringSlice(outcomes)
	}
	if slices.ContainsFunc(w.attempts, func(at ledger.Attempt[origin]) bool { return !at.Func.Release() }) {
		w.finish(said, attrReentrant.Bool(w.reentrant))
		return
	}
	w.finish(said)
}

// startHolds starts the spans of the locks that were granted, in the caller's
// trace, where the wait's own span is recorded.
func (w waitSpan) startHolds(answers []ledger.Answer) {
	if !w.IsRecording() {
		return
	}
	for i := range w.attempts {
		at := &w.attempts[i]
		again := slices.ContainsFunc(w.attempts[:i], func(b ledger.Attempt[origin]) bool {
			return b.Key == at.Key && b.Func.Share() == at.Func.Share() && b.Func.Session() == at.Func.Session() && b.Origin.hold != nil
		})
		if at.Key.Kind == locksql.KeyUnknown || at.Key.Kind == locksql.KeyNull || at.Func.Release() || answers[i] != ledger.Yes || again || w.conn.ledger.Count(*at) > 0 ||
			!at.Func.Session() && !w.conn.inTransaction() {
			continue
		}
		_, at.Origin.hold = w.conn.connector.tracer.Start(w.ctx, holdSpan, trace.WithLinks(trace.Link{SpanContext: w.SpanContext()})) // INTERNAL is the default
	}
}

// endHold ends the span of a lock that is held no more, and measures it.
func (c *Conn) endHold(e ledger.Ended[origin]) {
	c.connector.metrics.held(context.Background(), e)
	span := e.Origin.hold
	if span == nil {
		return
	}
	l := publicLock(e.Lock)
	span.SetAttributes(semconv.DBSystemNamePostgreSQL, attrKey.String(l.Key.String()), attrKeySpace.String(e.Key.Space.String()), attrLockMode.String(l.Mode.String()), attrScope.String(l.Scope.String()),
		attrBackendPID.Int64(int64(c.backendPID.Load())), semconv.CodeFilePath(l.Caller.File), semconv.CodeLineNumber(l.Caller.Line), semconv.CodeFunctionName(l.Caller.Function),
		attrEnd.String(e.End.String()))
	if e.End == ledger.Leaked || e.End == ledger.Lost {
		span.SetStatus(codes.Error, e.End.String())
	}
	span.End()
}

// blocked tells the wait's span who holds the lock, and links it to the spans
// of those that the same Connector has; those hear that somebody waits.
func (w waitSpan) blocked(holders []holder) {
	var pids []int64
	var apps, addrs, states, sinces, modes []string
	for _, h := range holders {
		pids = append(pids, int64(h.pid))
		apps, addrs, states = append(apps, h.application), append(addrs, h.address), append(states, h.state)
		sinces, modes = append(sinces, h.sinceText()), append(modes, h.mode.String())
		if h.span == nil {
			continue
		}
		w.AddLink(trace.Link{SpanContext: h.span.SpanContext()})
		h.span.AddEvent(wantedEvent, trace.WithAttributes(attrWaiterPID.Int64(int64(w.conn.backendPID.Load()))))
	}
	w.AddEvent(blockedEvent, trace.WithAttributes(attrHolderPID.Int64Slice(pids), attrHolderApp.StringSlice(apps), attrHolderAddr.StringSlice(addrs),
		attrHolderState.StringSlice(states), attrHolderSince.StringSlice(sinces), attrHolderMode.StringSlice(modes)))
}

// finish says the rest in one go, which takes the SDK half as long as one by
// one, and ends the span.
func (w waitSpan) finish(attrs ...attribute.KeyValue) {
	const ours = 7 // of one call
	all := append(make([]attribute.KeyValue, 0, len(attrs)+ours), attrs...)
	w.SetAttributes(append(w.appendCalls(all), attrBackendPID.Int64(int64(w.conn.backendPID.Load())), attrPoolMode.String(w.conn.poolMode().String()))...)
	w.End()
}

// refuse ends the span of a statement that a rule kept from being sent.
func (w waitSpan) refuse(err error) {
	if w.Span == nil {
		return
	}
	if !w.IsRecording() {
		w.End()
		return
	}
	attrs := []attribute.KeyValue{attrOutcome.String("refused")}
	var r *RuleError
	if errors.As(err, &r) {
		rule := string(r.Event.Rule)
		attrs = append(attrs, attrRule.String(rule), semconv.ErrorTypeKey.String(rule))
		w.SetStatus(codes.Error, rule)
	}
	w.finish(attrs...)
}

// fail ends the span with an error. A PostgreSQL error's text may quote an
// argument, so only its SQLSTATE is told.
func (w waitSpan) fail(err error) {
	if !w.IsRecording() && !w.conn.connector.metrics.wait.Enabled(w.ctx) {
		w.End()
		return // nobody asks what went wrong
	}
	state := sqlState(err)
	word := "error"
	switch {
	case state == "55P03":
		word = "timeout"
	case state == "57014", errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded),
		errors.Is(err, driver.ErrBadConn) && w.ctx.Err() != nil: // pgx's Exec, when nothing was sent
		word = "canceled"
	case state == "40P01":
		word = "deadlock"
	}
	w.conn.connector.metrics.waited(w.ctx, w.began, w.attempts, func(int) string { return word })
	switch {
	case !w.IsRecording():
		w.End()
	case state != "":
		w.SetStatus(codes.Error, "SQLSTATE "+state)
		w.finish(attrOutcome.String(word), semconv.DBResponseStatusCode(state), semconv.ErrorTypeKey.String(state))
	default:
		w.SetStatus(codes.Error, word)
		w.finish(attrOutcome.String(word), semconv.ErrorType(err))
	}
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
func (c *Conn) startOpaque(ctx context.Context, st *locksql.Statement, query string) waitSpan {
	if st.Form == locksql.NoCall {
		return waitSpan{}
	}
	_, span := c.connector.tracer.Start(ctx, opaqueSpan, c.spanOptions(opaqueSpan, query)...)
	return waitSpan{Span: span, conn: c, ctx: ctx, began: time.Now()}
}

func (w waitSpan) endOpaque(err error) {
	switch {
	case w.Span == nil:
	case err != nil:
		w.fail(err)
	case !w.IsRecording():
		w.End()
	default:
		w.finish(attrOutcome.String("unknown"))
	}
}

// hold is a lock and the span of its hold.
type hold struct {
	lock Lock
	span trace.Span
}

// holds are the session locks of the connection whose hold spans are recorded.
func (c *Conn) holds() (holds []hold) {
	for _, l := range c.ledger.Held() {
		if !l.Xact && l.Origin.hold != nil {
			holds = append(holds, hold{publicLock(l), l.Origin.hold})
		}
	}
	return holds
}

// addHoldEvents puts a finding on the spans of the locks that it is about, on
// each as it is about that one. Where nobody's span is in the context, as at the
// return to the pool, the first of them is in the one returned, so that logs and
// exemplars lead there.
func addHoldEvents(ctx context.Context, holds []hold, e Event) context.Context {
	for _, h := range holds {
		of := e
		of.Locks, of.Caller = []Lock{h.lock}, h.lock.Caller
		addSpanEvent(h.span, of)
	}
	if len(holds) > 0 && !trace.SpanContextFromContext(ctx).IsValid() {
		return trace.ContextWithSpan(ctx, holds[0].span)
	}
	return ctx
}

// addSpanEvent puts a rule's finding on a span.
func addSpanEvent(span trace.Span, e Event) {
	if !span.IsRecording() {
		return
	}
	attrs := []attribute.KeyValue{attrRule.String(string(e.Rule)), attrLevel.String(e.Level.String()), semconv.CodeFilePath(e.Caller.File), semconv.CodeLineNumber(e.Caller.Line), semconv.CodeFunctionName(e.Caller.Function)}
	if len(e.Locks) > 0 {
		attrs = append(attrs, attrKey.String(e.Locks[0].Key.String()))
	}
	if e.BackendPID != 0 {
		attrs = append(attrs, attrBackendPID.Int64(int64(e.BackendPID)))
	}
	span.AddEvent("pgadvlock "+string(e.Rule), trace.WithAttributes(attrs...))
}
