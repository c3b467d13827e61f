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
	statement *locksql.Statement // the one being sent; database/sql sends one at a time
}

type lane interface {
	driver.QueryerContext
	driver.ExecerContext
}

// oneConn is a driver.Driver whose only connection exists already: sqlmw wraps
// drivers, not connections.
type oneConn struct{ driver.Conn }

func (o oneConn) Open(string) (driver.Conn, error) { return o.Conn, nil }

func (c *Conn) lockLane(st *locksql.Statement) lane {
	if c.lock == nil {
		i := &interceptor{conn: c}
		wrapped, _ := sqlmw.Driver(oneConn{c.inner}, i).Open("") // fails only when oneConn does
		i.lane = wrapped.(lane)
		c.lock = i
	}
	c.lock.statement = st
	return c.lock.lane
}

// ConnQueryContext implements sqlmw.Interceptor.
func (i *interceptor) ConnQueryContext(ctx context.Context, inner driver.QueryerContext, query string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	rows, err := i.conn.run(ctx, query, i.statement, args, func(ctx context.Context) (driver.Rows, error) {
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
			mode := pgx.QueryExecModeExec
			if i.conn.pgx.Config().DefaultQueryExecMode == pgx.QueryExecModeSimpleProtocol {
				mode = pgx.QueryExecModeSimpleProtocol // the server may know no other
			}
			queryArgs = []driver.NamedValue{{Ordinal: 1, Value: mode}}
		}
		return i.conn.runAsQuery(ctx, query, i.statement, args, func(ctx context.Context) (driver.Rows, error) {
			return i.conn.queryer.QueryContext(ctx, query, queryArgs)
		})
	}
	return i.conn.runExec(ctx, query, i.statement, args, func(ctx context.Context) (driver.Result, error) {
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
func (c *Conn) runAsQuery(ctx context.Context, query string, st *locksql.Statement, args []driver.NamedValue, send func(context.Context) (driver.Rows, error)) (driver.Result, error) {
	rows, err := c.run(ctx, query, st, args, func(ctx context.Context) (driver.Rows, error) {
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
	return driver.RowsAffected(len(rows.rows)), rows.Close()
}

func (c *Conn) runExec(ctx context.Context, query string, st *locksql.Statement, args []driver.NamedValue, send func(context.Context) (driver.Result, error)) (result driver.Result, err error) {
	_, err = c.run(ctx, query, st, args, func(ctx context.Context) (driver.Rows, error) {
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
func (c *Conn) run(ctx context.Context, query string, st *locksql.Statement, args []driver.NamedValue, send func(context.Context) (driver.Rows, error)) (*replay, error) {
	c.catchUp()
	caller, pooled := callSite()
	attempts := c.attempts(st, args, caller)
	spanCtx, span := c.startWait(ctx, st, attempts, query)
	err := c.admit(ctx, evidence{statement: st, attempts: attempts, pooled: pooled}, caller)
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
	defer c.rearm()
	stopWatching := c.watchWait(span, caller)
	answered := false
	defer func() {
		if !answered { // a Valuer of the caller's panicked
			stopWatching()
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
	stopWatching()
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
	for i := range attempts {
		attempts[i].Origin.err = err
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
	if objection := c.judgeAnswers(ctx, attempts, answers, caller); objection != nil {
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

// attempts are the calls of a statement with their keys worked out.
func (c *Conn) attempts(st *locksql.Statement, args []driver.NamedValue, caller Caller) []ledger.Attempt[origin] {
	values, _ := c.parameters(args)
	attempts := make([]ledger.Attempt[origin], len(st.Calls))
	from := origin{since: time.Now(), caller: caller}
	for i := range st.Calls {
		call := &st.Calls[i]
		key := call.Key(func(n int) (any, bool) {
			if n < 1 || n > len(values) {
				return nil, false
			}
			return keyValue(values[n-1].Value)
		})
		if key.Kind == locksql.KeyExpression && c.connector.settings.keyArguments {
			key.Expr = key.Identity
		}
		attempts[i] = ledger.Attempt[origin]{Func: call.Func, Key: key, Origin: from}
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
	if err != nil || read != nil && len(read.rows) != 1 {
		return answers // all Unknown
	}
	for i, at := range attempts {
		switch {
		case read != nil:
			answers[i] = answerOf(at.Func, read.rows[0][i])
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
func (c *Conn) admit(ctx context.Context, e evidence, caller Caller) error {
	e.autocommit = c.pgx != nil && !c.inTransaction()
	e.isolation = c.isolation
	e.unbounded = c.unboundedWait(ctx)
	locks := make([]Lock, len(e.attempts))
	for i, at := range e.attempts {
		locks[i] = attemptedLock(at)
	}
	for _, r := range e.judge() {
		if err := c.object(ctx, r, locks, caller, nil); err != nil {
			return err
		}
	}
	if err := c.admitOrder(ctx, e.attempts, caller); err != nil || !e.statement.Session {
		return err
	}
	return c.admitRoad(ctx, locks, caller)
}

// judgeAnswers brings the answers before the rules. What it returns is for the
// caller, in place of the rows.
func (c *Conn) judgeAnswers(ctx context.Context, attempts []ledger.Attempt[origin], answers []ledger.Answer, caller Caller) error {
	for i, at := range attempts {
		if at.Func.Release() && answers[i] == ledger.No {
			locks := append([]Lock{attemptedLock(at)}, c.sessionLocks()...)
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
	caller, _ := callSite()
	locks := c.writtenLocks(st)
	for _, r := range (evidence{statement: st}).judge() {
		if err := c.object(ctx, r, locks, caller, nil); err != nil {
			return err
		}
	}
	if !session {
		return nil
	}
	return c.admitRoad(ctx, locks, caller)
}

// admitPrepare judges a statement that will take session locks when it is
// executed, where the road can be told to be wrong for it already.
func (c *Conn) admitPrepare(ctx context.Context, st *locksql.Statement) error {
	caller, _ := callSite()
	return c.admitPooler(ctx, c.writtenLocks(st), caller)
}

// writtenLocks are the locks that a statement names, without its arguments.
func (c *Conn) writtenLocks(st *locksql.Statement) []Lock {
	var locks []Lock
	for _, at := range c.attempts(st, nil, Caller{}) {
		if at.Func != locksql.UnlockAll {
			at.Origin = origin{}
			locks = append(locks, attemptedLock(at))
		}
	}
	return locks
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
// level. It is asked for every statement, so it looks at three letters.
func begins(query string) bool {
	for len(query) > 4 && (query[0] == ' ' || query[0] == '\n' || query[0] == '\t' || query[0] == '\r') {
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

// mayStep reports whether a text may be what locksql calls a step: transaction
// control, EXECUTE and the like. Prepared behind the ledger's back it would be
// executed unseen while the connection is armed. SELECT, INSERT, UPDATE and WITH
// are none.
func mayStep(query string) bool {
	query = strings.TrimLeft(query, " \t\r\n\f\v;")
	if query == "" {
		return false
	}
	if strings.IndexByte("abcdepr-/", query[0]|0x20) >= 0 || query[0] == '-' || query[0] == '/' {
		return true
	}
	return query[0]|0x20 == 's' && len(query) > 2 && !(query[1]|0x20 == 'e' && query[2]|0x20 == 'l')
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
		rows, err := s.conn.run(ctx, s.query, s.statement, args, func(ctx context.Context) (driver.Rows, error) {
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
		return s.conn.runAsQuery(ctx, s.query, s.statement, args, func(ctx context.Context) (driver.Rows, error) {
			return s.sendQuery(ctx, args)
		})
	}
	return s.conn.runExec(ctx, s.query, s.statement, args, func(ctx context.Context) (driver.Result, error) {
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
	inner driver.Rows
	rows  [][]driver.Value
	err   error // what Next says after them: io.EOF, or what went wrong
	next  int
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
	r := &replay{inner: rows}
	for {
		row := make([]driver.Value, len(rows.Columns()))
		if r.err = rows.Next(row); r.err != nil {
			return r
		}
		for i, v := range row {
			if b, ok := v.([]byte); ok {
				row[i] = bytes.Clone(b) // the driver's only until its next Next
			}
		}
		r.rows = append(r.rows, row)
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
	if r.next == len(r.rows) {
		return r.err
	}
	copy(dest, r.rows[r.next])
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
