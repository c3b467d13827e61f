package pgadvlock

//lint:file-ignore SA1019 Drivers that have nothing newer must keep working, as they do on database/sql.

// This file owns the lock lane: how a statement with a lock call is sent, and
// how its answer gets into the ledger. Every plain lock statement, however it
// was spelled in database/sql, ends in run; every other one that may change
// what is held ends in opaque.

import (
	"bytes"
	"cmp"
	"context"
	"database/sql/driver"
	"errors"
	"io"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/ngrok/sqlmw"

	"github.com/pgadvlock/pgadvlock/internal/ledger"
	"github.com/pgadvlock/pgadvlock/internal/locksql"
)

// interceptor sits between sqlmw's connection and the inner one. sqlmw hides
// driver interfaces younger than itself and allocates at every call, so only
// plain lock statements, whose one row of void and boolean needs neither, are
// sent through it.
type interceptor struct {
	sqlmw.NullInterceptor
	conn      *Conn
	lane      lane
	execMode  pgx.QueryExecMode  // for an Exec without arguments
	statement *locksql.Statement // the one being sent; database/sql sends one at a time
	from      site               // its
}

type lane interface {
	driver.QueryerContext
	driver.ExecerContext
}

// oneConn is a driver.Driver whose only connection exists already: sqlmw wraps
// drivers, not connections.
type oneConn struct{ driver.Conn }

func (o oneConn) Open(string) (driver.Conn, error) { return o.Conn, nil }

func (c *Conn) lockLane(st *locksql.Statement, from site) lane {
	if c.lock == nil {
		i := &interceptor{conn: c, execMode: pgx.QueryExecModeExec}
		if c.pgx != nil && c.pgx.Config().DefaultQueryExecMode == pgx.QueryExecModeSimpleProtocol {
			i.execMode = pgx.QueryExecModeSimpleProtocol // the server may know no other
		}
		wrapped, _ := sqlmw.Driver(oneConn{c.inner}, i).Open("") // fails only when oneConn does
		i.lane = wrapped.(lane)
		c.lock = i
	}
	c.lock.statement, c.lock.from = st, from
	return c.lock.lane
}

// ConnQueryContext implements sqlmw.Interceptor.
func (i *interceptor) ConnQueryContext(ctx context.Context, inner driver.QueryerContext, query string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	rows, err := i.conn.run(ctx, query, i.statement, i.from, args, func(ctx context.Context) (driver.Rows, error) {
		return inner.QueryContext(ctx, query, args)
	})
	if err != nil {
		return ctx, nil, err
	}
	return ctx, rows, nil
}

// ConnExecContext implements sqlmw.Interceptor.
func (i *interceptor) ConnExecContext(ctx context.Context, inner driver.ExecerContext, query string, args []driver.NamedValue) (driver.Result, error) {
	if needsRow(i.statement) {
		queryArgs := args
		if i.conn.pgx != nil && len(args) == 0 {
			// As pgx's Exec does without arguments: in one round trip, and
			// without a prepared statement that would stay behind.
			queryArgs = []driver.NamedValue{{Ordinal: 1, Value: i.execMode}}
		}
		return i.conn.runAsQuery(ctx, query, i.statement, i.from, args, func(ctx context.Context) (driver.Rows, error) {
			return i.conn.queryer.QueryContext(ctx, query, queryArgs)
		})
	}
	return i.conn.runExec(ctx, query, i.statement, i.from, args, func(ctx context.Context) (driver.Result, error) {
		return inner.ExecContext(ctx, query, args)
	})
}

// needsRow reports whether only the row tells what a statement did: a try may
// be answered false, and so may an unlock.
func needsRow(st *locksql.Statement) bool {
	for i := range st.Calls {
		if f := st.Calls[i].Func; f.Try() || f.Release() && f != locksql.UnlockAll {
			return true
		}
	}
	return false
}

// runAsQuery runs an Exec as a query and answers as Exec would have: of what
// was not sent, pgx's Query gives the cause where its Exec gives ErrBadConn.
func (c *Conn) runAsQuery(ctx context.Context, query string, st *locksql.Statement, from site, args []driver.NamedValue, send func(context.Context) (driver.Rows, error)) (driver.Result, error) {
	rows, err := c.run(ctx, query, st, from, args, func(ctx context.Context) (driver.Rows, error) {
		rows, err := send(ctx)
		if c.pgx != nil && pgconn.SafeToRetry(err) {
			err = driver.ErrBadConn
		}
		return rows, err
	})
	if err == nil {
		err = rows.failure()
	}
	if err != nil {
		return nil, err
	}
	return driver.RowsAffected(rows.count), rows.Close()
}

func (c *Conn) runExec(ctx context.Context, query string, st *locksql.Statement, from site, args []driver.NamedValue, send func(context.Context) (driver.Result, error)) (result driver.Result, err error) {
	_, err = c.run(ctx, query, st, from, args, func(ctx context.Context) (driver.Rows, error) {
		result, err = send(ctx)
		return nil, err
	})
	if err != nil {
		return nil, err
	}
	return result, nil
}

// run sends a plain lock statement, reads its one row where there is one, and
// enters in the ledger what the server said. Everything the caller gets is as
// the inner driver gave it, except where a rule at LevelError objects.
func (c *Conn) run(ctx context.Context, query string, st *locksql.Statement, from site, args []driver.NamedValue, send func(context.Context) (driver.Rows, error)) (*replay, error) {
	c.catchUp()
	attempts := c.attempts(c.room[:0], st, args, from.caller)
	c.room = attempts
	spanCtx, span := c.startWait(ctx, attempts, query)
	err := c.admit(ctx, evidence{statement: st, attempts: attempts, pooled: from.pooled}, from)
	if err != nil {
		span.refuse(err)
		return nil, err
	}

	limit, err := c.limitWait(ctx, attempts)
	if err != nil {
		span.fail(err)
		return nil, err
	}

	// Before the send: from here on the server may have granted it, whatever
	// happens to the answer (55P03 and 57014 race with the grant).
	c.ledger.Send(attempts)
	c.armed = true
	defer func() {
		clear(attempts)
		c.rearm()
	}()
	watching := c.watchWait(span)
	answered := false
	defer func() {
		if !answered { // a Valuer of the caller's panicked
			watching.stop()
			_ = limit.done(ctx, errInterrupted)
			c.ledger.Interrupted()
		}
	}()

	var read *replay
	rows, err := send(spanCtx)
	if err == nil && rows != nil {
		read = readAll(rows)
		err = read.failure()
	}
	answered = true
	watching.stop()
	unrun := notRun(err)
	if ended := limit.done(ctx, err); ended != err {
		err, read = ended, nil
	}
	if unrun {
		c.ledger.Unsent()
		c.mourn(ctx, err)
		if errors.Is(err, driver.ErrSkip) {
			return nil, err // database/sql asks in another way; the span is dropped
		}
		span.fail(err)
		return given(read, err)
	}
	answers := c.answers(attempts, read, err)
	span.startHolds(answers)
	if err != nil {
		for i := range attempts {
			attempts[i].Origin.err = err
		}
	}
	c.ledger.Settle(attempts, answers, c.inTransaction())
	span.end(answers, err)
	if err != nil {
		c.mourn(ctx, err)
		if objection := c.settleDoubts(ctx); objection != nil {
			return nil, objection
		}
		return given(read, err)
	}
	if objection := c.judgeAnswers(ctx, attempts, answers, from); objection != nil {
		if read != nil {
			_ = read.Close() // the row was read; the objection is what the caller gets
		}
		return nil, objection
	}
	return given(read, err)
}

// errInterrupted stands for a panic in the middle of a statement.
var errInterrupted = errors.New("interrupted")

// given is what the caller gets: an error met while reading the rows is said
// by their Next, as by the inner driver's own.
func given(read *replay, err error) (*replay, error) {
	if read != nil {
		return read, nil
	}
	return nil, err
}

// notRun reports whether an error proves that the statement was not executed:
// it never left, or the transaction had failed before it.
func notRun(err error) bool {
	if err == nil {
		return false
	}
	const inFailedSQLTransaction = "25P02"
	return errors.Is(err, driver.ErrSkip) || errors.Is(err, driver.ErrBadConn) ||
		pgconn.SafeToRetry(err) || sqlState(err) == inFailedSQLTransaction
}

// attempts are the calls of a statement with their keys worked out, appended to
// those given.
func (c *Conn) attempts(attempts []ledger.Attempt[origin], st *locksql.Statement, args []driver.NamedValue, caller Caller) []ledger.Attempt[origin] {
	values, _ := c.parameters(args)
	value := func(n int) (any, bool) {
		if n < 1 || n > len(values) {
			return nil, false
		}
		return keyValue(values[n-1].Value)
	}
	from := origin{caller: caller}
	if acquires(st) {
		from.since = time.Now()
	}
	for i := range st.Calls {
		call := &st.Calls[i]
		key := call.Key(value)
		if key.Kind == locksql.KeyExpression && c.connector.settings.keyArguments {
			key.Expr = key.Identity
		}
		attempts = append(attempts, ledger.Attempt[origin]{Func: call.Func, Key: key, Origin: from})
	}
	return attempts
}

// parameters returns the arguments that stand for $1, $2, ...: pgx takes its
// options before them. rewritten is true when a pgx.QueryRewriter will change
// text and arguments, so that nothing can be said about either.
func (c *Conn) parameters(args []driver.NamedValue) (values []driver.NamedValue, rewritten bool) {
	if c.pgx == nil {
		return args, false
	}
	for i, a := range args {
		switch a.Value.(type) {
		case pgx.QueryExecMode, pgx.QueryResultFormats, pgx.QueryResultFormatsByOID:
		case pgx.QueryRewriter:
			return nil, true
		default:
			return args[i:], false
		}
	}
	return nil, false
}

// keyValue turns an argument into what locksql evaluates: nil, an int64, or
// the text that PostgreSQL's integer input would read. ok is false for a value
// whose text only the driver underneath knows.
func keyValue(v any) (value any, ok bool) {
	defer func() {
		if recover() != nil { // a Valuer of the caller's; pgx will call it again and report
			value, ok = nil, false
		}
	}()
	for range 8 { // pointers to pointers, Valuers that give Valuers: not for ever
		switch x := v.(type) {
		case nil:
			return nil, true
		case int64:
			return x, true
		case string:
			return x, true
		case driver.Valuer:
			// As pgx and database/sql do: a nil pointer is NULL where the method
			// is the value's, and may give a value where it is the pointer's.
			rv := reflect.ValueOf(x)
			if rv.Kind() == reflect.Pointer && rv.IsNil() && rv.Type().Elem().Implements(reflect.TypeFor[driver.Valuer]()) {
				return nil, true
			}
			next, err := x.Value()
			if err != nil {
				return nil, false
			}
			v = next
			continue
		}
		rv := reflect.ValueOf(v)
		switch rv.Kind() {
		case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
			return rv.Int(), true
		case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
			return int64(rv.Uint()), rv.Uint() <= 1<<63-1
		case reflect.Float32, reflect.Float64:
			n := int64(rv.Float())
			return n, float64(n) == rv.Float()
		case reflect.String:
			return rv.String(), true
		case reflect.Pointer:
			if rv.IsNil() {
				return nil, true
			}
			v = rv.Elem().Interface()
		default:
			return nil, false
		}
	}
	return nil, false
}

// answers reads what the server said to each call. Without a row, as for an
// Exec of calls that wait, success is the answer.
func (c *Conn) answers(attempts []ledger.Attempt[origin], read *replay, err error) []ledger.Answer {
	answers := make([]ledger.Answer, len(attempts))
	if err != nil || read != nil && read.count != 1 {
		return answers // all Unknown
	}
	for i, at := range attempts {
		switch {
		case read != nil:
			answers[i] = answerOf(at.Func, read.values[i])
		case at.Key.Kind == locksql.KeyNull:
			answers[i] = ledger.Null
		default:
			answers[i] = ledger.Yes
		}
	}
	return answers
}

// answerOf reads one column. The functions that wait return void, which is
// some value or other in every driver, but NULL for a NULL key.
func answerOf(f locksql.Func, v driver.Value) ledger.Answer {
	if v == nil {
		return ledger.Null
	}
	if f.Blocking() || f == locksql.UnlockAll {
		return ledger.Yes
	}
	var text string
	switch v := v.(type) {
	case bool:
		if v {
			return ledger.Yes
		}
		return ledger.No
	case []byte:
		text = string(v)
	case string:
		text = v
	}
	switch text {
	case "t", "true":
		return ledger.Yes
	case "f", "false":
		return ledger.No
	}
	return ledger.Unknown
}

// admit brings a statement before the rules, those first that need no question
// to the server. An error means that it must not be sent.
func (c *Conn) admit(ctx context.Context, e evidence, from site) error {
	e.autocommit = c.pgx != nil && !c.inTransaction()
	e.isolation = c.isolation
	e.unbounded = c.connector.discipline.level(RuleUnboundedWait) > LevelOff && c.unboundedWait(ctx)
	for _, r := range e.judge() {
		if c.connector.discipline.level(r) == LevelOff {
			continue
		}
		caller := c.caller(from)
		if err := c.object(ctx, r, attemptedLocks(e.attempts, caller), caller, nil); err != nil {
			return err
		}
	}
	if acquires(e.statement) {
		if err := c.admitOrder(ctx, e.attempts, from.caller); err != nil {
			return err
		}
	}
	if !e.statement.Session {
		return nil
	}
	return c.admitRoad(ctx, e.attempts, from)
}

func attemptedLocks(attempts []ledger.Attempt[origin], caller Caller) []Lock {
	locks := make([]Lock, len(attempts))
	for i, at := range attempts {
		locks[i] = attemptedLock(at)
		locks[i].Caller = caller
	}
	return locks
}

// judgeAnswers brings the answers before the rules. What it returns is for the
// caller, in place of the rows.
func (c *Conn) judgeAnswers(ctx context.Context, attempts []ledger.Attempt[origin], answers []ledger.Answer, from site) error {
	for i, at := range attempts {
		if at.Func.Release() && answers[i] == ledger.No {
			caller := c.caller(from)
			locks := append(attemptedLocks(attempts[i:i+1], caller), c.sessionLocks()...)
			if err := c.object(ctx, RuleUnlockNotHeld, locks, caller, nil); err != nil {
				return err
			}
		}
	}
	return nil
}

// event is an Event with what the connection knows of itself.
func (c *Conn) event(r Rule, level Level, locks []Lock) Event {
	e := Event{Time: time.Now(), Rule: r, Level: level, Locks: locks, BackendPID: c.backendPID.Load(), PoolMode: c.poolMode()}
	if len(locks) > 0 {
		e.Caller = locks[0].Caller
	}
	return e
}

// parse finds the lock calls of a text, as the connection's own setting of
// standard_conforming_strings has it read.
func (c *Conn) parse(query string) *locksql.Statement {
	standard := c.pgx == nil || c.pgx.PgConn().ParameterStatus("standard_conforming_strings") != "off"
	return c.connector.recognizer.Parse(query, standard)
}

// plain reports whether a statement can be counted call by call.
func (c *Conn) plain(st *locksql.Statement, args []driver.NamedValue) bool {
	if st.Form != locksql.Plain {
		return false
	}
	_, rewritten := c.parameters(args)
	return !rewritten
}

// opaque sends a statement that is not counted call by call: it may take locks
// in a number that only the server knows, or change what is held without
// naming a lock function, or merely have been looked at because the connection
// is armed.
func (c *Conn) opaque(ctx context.Context, query string, st *locksql.Statement, send func() error) error {
	c.catchUp()
	executes := c.ledger.Before(st.Steps)
	if slices.ContainsFunc(st.Steps, func(s locksql.Step) bool { return s.Kind == locksql.StepPrepare && s.Session }) {
		if err := c.admitPrepare(ctx, st); err != nil {
			return err
		}
	}
	// A bare name may be that of a statement which was prepared on the raw
	// connection: pgx takes it for that.
	executes = executes || c.lent && len(st.Steps) == 0 && bare(query)
	session := st.Session && st.Form != locksql.NoCall || executes
	span := c.startOpaque(ctx, st, query)
	if st.Form != locksql.NoCall || executes {
		if err := c.admitOpaque(ctx, st, session); err != nil {
			span.refuse(err)
			return err
		}
	}
	switch {
	case session && st.Deferred:
		c.ledger.Declare()
	case session:
		c.ledger.Taint()
	}
	c.rearm()
	defer c.rearm()

	err := send()
	span.endOpaque(err)
	if err == nil {
		c.ledger.After(st.Steps)
		c.followTransaction(st.Steps)
	}
	if err != nil {
		c.mourn(ctx, err)
	}
	if c.armed && c.settled() && !c.inTransaction() {
		c.ledger.EndTransaction()
		_ = c.settleDoubts(ctx) // of an earlier statement: this one is not to blame
	}
	return err
}

// admitOpaque is admit for a statement that is not counted call by call.
func (c *Conn) admitOpaque(ctx context.Context, st *locksql.Statement, session bool) error {
	from := c.connector.sites.find(true)
	written := c.written(st)
	for _, r := range (evidence{statement: st}).judge() {
		if err := c.object(ctx, r, attemptedLocks(written, from.caller), from.caller, nil); err != nil {
			return err
		}
	}
	if !session {
		return nil
	}
	return c.admitRoad(ctx, written, from)
}

// admitPrepare judges a statement that will take session locks when it is
// executed, where the road can be told to be wrong for it already.
func (c *Conn) admitPrepare(ctx context.Context, st *locksql.Statement) error {
	return c.admitPooler(ctx, c.written(st), c.connector.sites.find(true))
}

// written are the calls of a statement that name a lock, without its arguments.
func (c *Conn) written(st *locksql.Statement) (written []ledger.Attempt[origin]) {
	for _, at := range c.attempts(nil, st, nil, Caller{}) {
		if at.Func != locksql.UnlockAll {
			at.Origin = origin{}
			written = append(written, at)
		}
	}
	return written
}

// catchUp enters, before a statement is sent, that a transaction ended unseen,
// as through Raw.
func (c *Conn) catchUp() {
	if c.pgx != nil && c.armed && c.settled() && !c.inTransaction() {
		c.ledger.EndTransaction()
	}
}

// settled reports whether inTransaction can be believed: while rows are open
// the last ReadyForQuery is that of an earlier statement.
func (c *Conn) settled() bool { return c.pgx == nil || !c.pgx.PgConn().IsBusy() }

// followTransaction keeps what texts say of transactions: whether one is open,
// for drivers that do not tell, and its isolation level, which none tells.
func (c *Conn) followTransaction(steps []locksql.Step) {
	for _, s := range steps {
		switch s.Kind {
		case locksql.StepBegin:
			c.inTx, c.isolation, c.txIsolation = true, cmp.Or(s.Isolation, c.defaultIsolation), c.defaultIsolation
		case locksql.StepCommit, locksql.StepRollback, locksql.StepPrepareTransaction:
			if s.Kind == locksql.StepRollback {
				c.defaultIsolation = c.txIsolation
			}
			if c.inTx = s.Chain; !s.Chain {
				c.isolation = ""
			}
		case locksql.StepSetTransaction:
			c.isolation = s.Isolation
		case locksql.StepSetSession:
			c.defaultIsolation = cmp.Or(s.Isolation, c.startIsolation)
		case locksql.StepDiscardAll:
			c.defaultIsolation = c.startIsolation
		}
	}
}

// begins reports whether a text may begin a transaction or set an isolation
// level. It is asked for every statement, so it looks at three letters; at one of
// SELECT and DELETE, which the compiler inlines: no text that begins has an l there.
func begins(query string) bool {
	return (len(query) < 3 || query[2]|0x20 != 'l') && mayBegin(query)
}

func mayBegin(query string) bool {
	for len(query) > 4 && space(query[0]) {
		query = query[1:]
	}
	if len(query) < 4 {
		return false
	}
	switch query[0] | 0x20 {
	case 'b': // BEGIN
		return query[1]|0x20 == 'e'
	case 's': // START TRANSACTION, SET
		return query[1]|0x20 == 't' || query[1]|0x20 == 'e' && query[2]|0x20 == 't'
	case 'r': // RESET
		return query[1]|0x20 == 'e' && query[2]|0x20 == 's'
	case 'd': // DISCARD
		return query[1]|0x20 == 'i'
	}
	return false
}

// space reports whether the byte is white space to PostgreSQL: \t, \n, \v, \f, \r
// or a space.
func space(b byte) bool { return b == ' ' || b-'\t' < 5 }

// mayStep reports whether a text may be what locksql calls a step: transaction
// control, EXECUTE and the like. Prepared behind the ledger's back it would be
// executed unseen while the connection is armed. SELECT, INSERT, UPDATE and WITH
// are none.
func mayStep(query string) bool {
	for query != "" && (space(query[0]) || query[0] == ';') {
		query = query[1:]
	}
	if query == "" {
		return false
	}
	switch query[0] | 0x20 {
	case 'a', 'b', 'c', 'd', 'e', 'p', 'r', '-', '/':
		return true
	case 's':
		return len(query) > 2 && !(query[1]|0x20 == 'e' && query[2]|0x20 == 'l')
	}
	return false
}

// bare reports whether a text is one word, which pgx may know as the name of a
// prepared statement.
func bare(query string) bool {
	return !strings.ContainsAny(strings.TrimSpace(query), " \t\r\n")
}

// stmt is a prepared statement that takes part in the lane; all others are the
// inner driver's own.
type stmt struct {
	driver.Stmt
	conn      *Conn
	query     string
	statement *locksql.Statement
}

var (
	_ driver.StmtQueryContext  = (*stmt)(nil)
	_ driver.StmtExecContext   = (*stmt)(nil)
	_ driver.NamedValueChecker = (*stmt)(nil)
	_ driver.ColumnConverter   = convertingStmt{}
)

// convertingStmt is a stmt whose inner one converts arguments by column.
// database/sql takes another path for those, so the method must not be there
// for the others.
type convertingStmt struct {
	*stmt
	converter driver.ColumnConverter
}

func (s convertingStmt) ColumnConverter(i int) driver.ValueConverter {
	return s.converter.ColumnConverter(i)
}

func newStmt(c *Conn, inner driver.Stmt, query string, st *locksql.Statement) driver.Stmt {
	s := &stmt{Stmt: inner, conn: c, query: query, statement: st}
	if conv, ok := inner.(driver.ColumnConverter); ok {
		return convertingStmt{s, conv}
	}
	return s
}

// CheckNamedValue implements driver.NamedValueChecker: the inner statement's,
// or else the inner connection's, as database/sql looks for it.
func (s *stmt) CheckNamedValue(nv *driver.NamedValue) error {
	if checker, ok := s.Stmt.(driver.NamedValueChecker); ok {
		return checker.CheckNamedValue(nv)
	}
	return s.conn.checkNamedValue(nv)
}

// QueryContext implements driver.StmtQueryContext.
func (s *stmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	if s.conn.plain(s.statement, args) {
		rows, err := s.conn.run(ctx, s.query, s.statement, s.conn.connector.sites.find(s.conn.asks(s.statement)), args, func(ctx context.Context) (driver.Rows, error) {
			return s.sendQuery(ctx, args)
		})
		if err != nil {
			return nil, err
		}
		return rows, nil
	}
	var rows driver.Rows
	err := s.conn.opaque(ctx, s.query, s.statement, func() (err error) {
		rows, err = s.sendQuery(ctx, args)
		return err
	})
	return rows, err
}

// ExecContext implements driver.StmtExecContext.
func (s *stmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	switch {
	case !s.conn.plain(s.statement, args):
		var result driver.Result
		err := s.conn.opaque(ctx, s.query, s.statement, func() (err error) {
			result, err = s.sendExec(ctx, args)
			return err
		})
		return result, err
	case needsRow(s.statement):
		return s.conn.runAsQuery(ctx, s.query, s.statement, s.conn.connector.sites.find(s.conn.asks(s.statement)), args, func(ctx context.Context) (driver.Rows, error) {
			return s.sendQuery(ctx, args)
		})
	}
	return s.conn.runExec(ctx, s.query, s.statement, s.conn.connector.sites.find(s.conn.asks(s.statement)), args, func(ctx context.Context) (driver.Result, error) {
		return s.sendExec(ctx, args)
	})
}

func (s *stmt) sendQuery(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	if q, ok := s.Stmt.(driver.StmtQueryContext); ok {
		return q.QueryContext(ctx, args)
	}
	values, err := unnamed(ctx, args)
	if err != nil {
		return nil, err
	}
	return s.Stmt.Query(values)
}

func (s *stmt) sendExec(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	if e, ok := s.Stmt.(driver.StmtExecContext); ok {
		return e.ExecContext(ctx, args)
	}
	values, err := unnamed(ctx, args)
	if err != nil {
		return nil, err
	}
	return s.Stmt.Exec(values)
}

// replay hands out rows that were read to learn the outcome. It offers every
// optional Rows interface, because sqlmw takes the inner rows' set for granted
// (it unwraps) and panics where one is missing; where the inner rows lack one
// it answers as database/sql does.
type replay struct {
	inner  driver.Rows
	values []driver.Value // row by row
	width  int            // of a row
	count  int            // of rows
	err    error          // what Next says after them: io.EOF, or what went wrong
	next   int
	few    [4]driver.Value // where values are as long as they are few
}

var (
	_ driver.RowsNextResultSet              = (*replay)(nil)
	_ driver.RowsColumnTypeDatabaseTypeName = (*replay)(nil)
	_ driver.RowsColumnTypeLength           = (*replay)(nil)
	_ driver.RowsColumnTypeNullable         = (*replay)(nil)
	_ driver.RowsColumnTypePrecisionScale   = (*replay)(nil)
	_ driver.RowsColumnTypeScanType         = (*replay)(nil)
	_ sqlmw.RowsUnwrapper                   = (*replay)(nil)
)

// readAll reads to the end, after which the connection is idle and its
// transaction status fresh.
func readAll(rows driver.Rows) *replay {
	r := &replay{inner: rows, width: len(rows.Columns())}
	r.values = r.few[:0]
	for {
		read := len(r.values)
		r.values = append(r.values, make([]driver.Value, r.width)...)
		row := r.values[read:]
		if r.err = rows.Next(row); r.err != nil {
			r.values = r.values[:read]
			return r
		}
		r.count++
		for i, v := range row {
			if b, ok := v.([]byte); ok {
				row[i] = bytes.Clone(b) // the driver's only until its next Next
			}
		}
	}
}

// failure returns the error that ended the rows early, or nil.
func (r *replay) failure() error {
	if r.err == io.EOF {
		return nil
	}
	return r.err
}

func (r *replay) Unwrap() driver.Rows { return r.inner }
func (r *replay) Columns() []string   { return r.inner.Columns() }
func (r *replay) Close() error        { return r.inner.Close() }

func (r *replay) Next(dest []driver.Value) error {
	if r.next == r.count {
		return r.err
	}
	copy(dest, r.values[r.next*r.width:][:r.width])
	r.next++
	return nil
}

func (r *replay) HasNextResultSet() bool {
	n, ok := r.inner.(driver.RowsNextResultSet)
	return ok && n.HasNextResultSet()
}

func (r *replay) NextResultSet() error {
	if n, ok := r.inner.(driver.RowsNextResultSet); ok {
		return n.NextResultSet()
	}
	return io.EOF
}

func (r *replay) ColumnTypeDatabaseTypeName(i int) string {
	if t, ok := r.inner.(driver.RowsColumnTypeDatabaseTypeName); ok {
		return t.ColumnTypeDatabaseTypeName(i)
	}
	return ""
}

func (r *replay) ColumnTypeLength(i int) (length int64, ok bool) {
	if t, ok := r.inner.(driver.RowsColumnTypeLength); ok {
		return t.ColumnTypeLength(i)
	}
	return 0, false
}

func (r *replay) ColumnTypeNullable(i int) (nullable, ok bool) {
	if t, ok := r.inner.(driver.RowsColumnTypeNullable); ok {
		return t.ColumnTypeNullable(i)
	}
	return false, false
}

func (r *replay) ColumnTypePrecisionScale(i int) (precision, scale int64, ok bool) {
	if t, ok := r.inner.(driver.RowsColumnTypePrecisionScale); ok {
		return t.ColumnTypePrecisionScale(i)
	}
	return 0, 0, false
}

func (r *replay) ColumnTypeScanType(i int) reflect.Type {
	if t, ok := r.inner.(driver.RowsColumnTypeScanType); ok {
		return t.ColumnTypeScanType(i)
	}
	return reflect.TypeFor[any]()
}
