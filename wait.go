package pgadvlock

// This file owns what waiting can do to a lock: how long it may take, in which
// order keys are waited for, and what became of a lock whose wait ended in an
// error.

import (
	"cmp"
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"go.opentelemetry.io/otel/trace"

	"github.com/pgadvlock/pgadvlock/internal/ledger"
	"github.com/pgadvlock/pgadvlock/internal/lockorder"
	"github.com/pgadvlock/pgadvlock/internal/locksql"
)

// orderDepth is how many of the locks held are looked at for their order.
const orderDepth = 16

// orderGraph is the orders that a Connector's sessions wait in.
type orderGraph = lockorder.Graph[locksql.Key, orderSite]

// orderSite is what a report of an order says of each lock.
type orderSite struct {
	caller Caller
	scope  Scope
}

// admitOrder enters the order of a statement's waits in the connector's graph,
// and objects to one that is the opposite of an earlier one.
func (c *Conn) admitOrder(ctx context.Context, attempts []ledger.Attempt[origin], caller Caller) error {
	if c.connector.discipline.level(RuleLockOrder) == LevelOff {
		return nil
	}
	var held []lockorder.Lock[locksql.Key, orderSite]
	for _, l := range c.ledger.Recent(orderDepth) {
		held = append(held, orderedLock(l))
	}
	for _, at := range attempts {
		if at.Func.Release() || at.Key.Kind == locksql.KeyUnknown || at.Key.Kind == locksql.KeyNull {
			continue
		}
		wanted := orderedLock(ledger.Lock[origin]{Key: at.Key, Share: at.Func.Share(), Xact: !at.Func.Session(), Origin: at.Origin})
		if at.Func.Blocking() && len(held) > 0 && c.ledger.Count(at) == 0 {
			for _, f := range c.connector.orders.Wait(held, wanted) {
				locks := []Lock{orderLock(f.Held), orderLock(f.Wanted)}
				if !f.Upgrade {
					locks = append(locks, orderLock(f.Before[0]), orderLock(f.Before[1]))
				}
				if err := c.object(ctx, RuleLockOrder, locks, caller, nil); err != nil {
					return err
				}
			}
		}
		if len(attempts) > 1 {
			held = append(held, wanted)
		}
	}
	return nil
}

func orderedLock(l ledger.Lock[origin]) lockorder.Lock[locksql.Key, orderSite] {
	return lockorder.Lock[locksql.Key, orderSite]{Key: l.Key, Share: l.Share, Site: orderSite{l.Origin.caller, scopeOf(l.Xact)}}
}

func orderLock(l lockorder.Lock[locksql.Key, orderSite]) Lock {
	return Lock{Key: publicKey(l.Key), Mode: modeOf(l.Share), Scope: l.Site.scope, Caller: l.Site.caller}
}

// limit is a wait bounded by pgadvlock_max_wait: what must be undone when the
// lock has been granted or not.
type limit struct {
	conn    *Conn
	began   bool   // outside a transaction, one was begun for it
	restore string // inside one, the lock_timeout to restore
	ours    bool   // our bound is the tighter one
}

// sqlLimit tightens lock_timeout for the transaction, and returns what it was
// and what it is. PostgreSQL shows it with a unit, which an interval can read;
// 0 is no limit. Evaluated from left to right.
const (
	sqlLimit = "SELECT pg_catalog.current_setting('lock_timeout'), pg_catalog.set_config('lock_timeout'," +
		" CASE WHEN " + sqlSeconds + " OPERATOR(pg_catalog.>) 0::pg_catalog.float8" +
		" AND " + sqlSeconds + " OPERATOR(pg_catalog.<=) '%[2]g'::pg_catalog.float8" +
		" THEN pg_catalog.current_setting('lock_timeout') ELSE '%[1]d' END, true)"
	sqlSeconds = "pg_catalog.date_part('epoch', pg_catalog.current_setting('lock_timeout')::pg_catalog.interval)"
)

// limitWait bounds the waits of a statement that is about to be sent. It must
// be followed by done.
func (c *Conn) limitWait(ctx context.Context, attempts []ledger.Attempt[origin]) (*limit, error) {
	bound := c.connector.settings.maxWait
	waits := false
	for _, at := range attempts {
		waits = waits || at.Func.Blocking()
	}
	if bound == 0 || !waits {
		return nil, nil
	}
	if c.pgx != nil && (c.gone() || c.busy() || c.pgx.PgConn().TxStatus() == 'E') {
		return nil, nil // the statement itself will say so
	}
	l := &limit{conn: c, began: !c.inTransaction()}
	if l.began {
		if err := c.askPoolMode(ctx); err != nil {
			return nil, err
		}
		if c.poolMode() == PoolStatement {
			return nil, nil // it knows no transactions, so there is nowhere to put the bound
		}
	}
	nth := 0
	sql := fmt.Sprintf(sqlLimit, bound.Milliseconds(), float64(bound.Milliseconds())/1000)
	if l.began {
		if c.pgx == nil {
			if err := c.send(ctx, "BEGIN"); err != nil {
				return nil, err
			}
		} else {
			sql, nth = "BEGIN; "+sql, 1
		}
		c.inTx = true
	}
	rows, err := c.query(ctx, sql, nth)
	if err == nil && (len(rows) != 1 || len(rows[0]) != 2) {
		err = errors.New("lock_timeout was not told")
	}
	if err != nil {
		if pgconn.SafeToRetry(err) || errors.Is(err, driver.ErrBadConn) {
			c.inTx = c.inTx && !l.began
			return nil, driver.ErrBadConn // as pgx's stdlib does, so that database/sql tries another connection
		}
		_ = l.done(ctx, err)
		return nil, fmt.Errorf("pgadvlock: pgadvlock_max_wait: %w", err)
	}
	l.restore, l.ours = rows[0][0], rows[0][0] != rows[0][1]
	return l, nil
}

// done puts lock_timeout back. A statement that failed has failed its
// transaction, whose end, or whose ROLLBACK TO, puts it back; one that was
// begun for it is ended. That must not depend on the caller's context, which may
// have ended in the meantime: what cannot be put back is not left behind, and
// the connection is closed.
func (l *limit) done(ctx context.Context, err error) error {
	if l == nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.conn.connector.settings.resetTimeout)
	defer cancel()
	var failed error
	switch {
	case l.conn.gone():
	case err == nil && l.began:
		failed = l.conn.endLimit(ctx, "COMMIT")
	case err == nil:
		failed = l.conn.send(ctx, "SELECT pg_catalog.set_config('lock_timeout', '"+l.restore+"', true)")
	case l.began:
		failed = l.conn.endLimit(ctx, "ROLLBACK")
	}
	if failed != nil && l.conn.pgx != nil {
		_ = l.conn.pgx.Close(ctx) // it is broken already, or must not be used
	}
	if err == nil {
		return failed
	}
	const lockNotAvailable = "55P03"
	if l.ours && sqlState(err) == lockNotAvailable {
		return fmt.Errorf("pgadvlock: the lock was not granted within pgadvlock_max_wait=%s: %w", l.conn.connector.settings.maxWait, err)
	}
	return err
}

func (c *Conn) endLimit(ctx context.Context, sql string) error {
	c.inTx = false
	return c.send(ctx, sql)
}

// settleDoubts finds out what became of locks whose wait ended in an error: a
// lock_timeout or a cancel can race with the grant. What was granted is
// released, since the caller was told that it does not have it, and reported.
// It needs an idle session outside a transaction, so it is tried after the
// error, when a transaction ends, and at the return to the pool.
func (c *Conn) settleDoubts(ctx context.Context) (objection error) {
	if !c.idle() {
		return nil
	}
	doubts := c.ledger.Doubts()
	if mode := c.poolMode(); len(doubts) == 0 || mode != PoolDirect && mode != PoolSession {
		return nil
	}
	defer c.rearm()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.connector.settings.resetTimeout)
	defer cancel()
	granted, kept, ok := c.takeBack(ctx, doubts)
	if !ok {
		return nil // still in doubt: the return to the pool will release
	}
	c.ledger.Resolve(kept)
	for _, g := range granted {
		lock := attemptedLock(g.attempt)
		lock.Key, lock.Count = g.key, len(kept) // 1 when it is left where it is
		if e := c.object(ctx, RuleGrantedAfterError, []Lock{lock}, g.attempt.Origin.caller, g.attempt.Origin.err); e != nil && objection == nil {
			objection = e
		}
	}
	return objection
}

// takeBack finds the locks in doubt that were granted and releases them, or
// keeps them where nothing may be released. The cancel or the timeout that
// brought the doubt may hit its own statements as well, so those are sent
// again, after another look at what is there. ok is false when it remains
// unknown.
func (c *Conn) takeBack(ctx context.Context, doubts []ledger.Attempt[origin]) (granted []grant, kept []ledger.Attempt[origin], ok bool) {
	const tries = 10
	for range tries {
		rows, err := c.query(ctx, sqlReport, 0)
		if err == nil {
			there, sure := c.granted(doubts, rows)
			if !sure {
				return nil, nil, false
			}
			for _, g := range there {
				if !slices.ContainsFunc(granted, func(h grant) bool { return h.key == g.key && h.attempt.Func == g.attempt.Func }) {
					granted = append(granted, g)
				}
				if c.observes() {
					kept = append(kept, g.attempt)
				} else if err = c.send(ctx, g.unlock()); err != nil {
					break
				}
			}
			if err == nil {
				return granted, kept, true
			}
		}
		if sqlState(err) != queryCanceled || !c.idle() {
			break
		}
	}
	return nil, nil, false
}

// grant is a lock that was granted although its statement failed.
type grant struct {
	attempt ledger.Attempt[origin]
	key     Key // as the server has it
}

// unlock is the statement that gives it back.
func (g grant) unlock() string {
	f := "pg_advisory_unlock"
	if g.attempt.Func.Share() {
		f = "pg_advisory_unlock_shared"
	}
	if a, b, ok := g.key.Ints(); ok {
		return fmt.Sprintf("SELECT pg_catalog.%s(%d, %d)", f, a, b)
	}
	n, _ := g.key.Bigint()
	return "SELECT pg_catalog." + f + "('" + strconv.FormatInt(n, 10) + "'::pg_catalog.int8)"
}

// granted picks the locks in doubt that the server has, from all that it has
// for this session. A key that is known by its expression only is found by
// elimination; sure is false when that does not tell.
func (c *Conn) granted(doubts []ledger.Attempt[origin], rows [][]string) (granted []grant, sure bool) {
	type kind struct {
		space locksql.Space
		mode  LockMode
	}
	inDoubt := map[Lock]ledger.Attempt[origin]{}
	var byExpression []ledger.Attempt[origin]
	for _, at := range doubts {
		if at.Key.Kind == locksql.KeyNumber {
			l := attemptedLock(at)
			inDoubt[Lock{Key: l.Key, Mode: l.Mode}] = at
		} else {
			byExpression = append(byExpression, at)
		}
	}
	numbers, expressions := map[Lock]bool{}, map[kind]int{}
	for _, l := range c.sessionLocks() {
		if l.Key.number {
			numbers[Lock{Key: l.Key, Mode: l.Mode}] = true
		} else {
			expressions[kind{l.Key.space, l.Mode}]++
		}
	}
	left := map[kind][]Key{}
	for _, row := range rows {
		l := lockOfRow(row)
		if numbers[l] {
			continue
		}
		if at, ok := inDoubt[l]; ok {
			granted = append(granted, grant{at, l.Key})
			continue
		}
		k := kind{l.Key.space, l.Mode}
		left[k] = append(left[k], l.Key)
	}
	for _, at := range byExpression {
		k := kind{at.Key.Space, modeOf(at.Func.Share())}
		switch extra := len(left[k]) - expressions[k]; {
		case extra == 0:
		case extra == 1 && expressions[k] == 0 && len(byExpression) == 1:
			granted = append(granted, grant{at, left[k][0]})
		default:
			return nil, false
		}
	}
	return granted, true
}

// mourn reports the locks that went with a connection which broke. err is what
// showed it, nil when nothing was said.
func (c *Conn) mourn(ctx context.Context, err error) {
	if !c.gone() || c.holdsNothing() {
		return
	}
	if err == nil {
		err = errors.New("the connection is closed")
	}
	c.lose(ctx, err)
}

// lose reports that the session and its locks are gone.
func (c *Conn) lose(ctx context.Context, err error) {
	if locks := c.sessionLocks(); len(locks) > 0 {
		c.report(ctx, RuleLostLock, locks, err)
	}
	c.ledger.Returned(ledger.Lost)
	c.rearm()
}

// holdsNothing reports whether the ledger has neither a lock nor a doubt.
func (c *Conn) holdsNothing() bool {
	return c.ledger.State() == ledger.Clean && len(c.ledger.Recent(1)) == 0
}

// unboundedWait reports whether nothing of the caller's or ours ends a wait.
func (c *Conn) unboundedWait(ctx context.Context) bool {
	_, deadline := ctx.Deadline()
	return !deadline && c.connector.settings.maxWait == time.Duration(0)
}

// holder is a session that has a lock which another one waits for.
type holder struct {
	pid         uint32
	mode        LockMode
	application string
	address     string // of its client, "" over a Unix socket
	state       string // as in pg_stat_activity; "" when this role may not see it
	since       time.Time
	span        trace.Span // of its hold, when the same Connector has it
}

func (h holder) sinceText() string {
	if h.since.IsZero() {
		return ""
	}
	return h.since.UTC().Format(time.RFC3339Nano)
}

// String describes the holder for people.
func (h holder) String() string {
	s := fmt.Sprintf("pid %d", h.pid)
	if h.application != "" {
		s += " (" + h.application + ")"
	}
	if h.address != "" {
		s += " from " + h.address
	}
	if h.state == "" {
		return s + ", its state not visible to this role"
	}
	return s + ", " + h.state + " since " + h.sinceText()
}

// sqlHolders asks who has a lock that a session waits for. A key that is a
// number is looked for as such; one that is an expression as what the waiting
// backend waits for, so that it need not be computed.
const (
	sqlHolders = `SELECT h.pid, h.mode, COALESCE(a.application_name, ''), COALESCE(pg_catalog.host(a.client_addr), ''), COALESCE(a.state, ''),
	COALESCE(pg_catalog.date_part('epoch', a.state_change)::pg_catalog.text, ''), h.classid, h.objid, h.objsubid
FROM pg_catalog.pg_locks h JOIN %s
	AND h.database OPERATOR(pg_catalog.=) w.database AND h.classid OPERATOR(pg_catalog.=) w.classid
	AND h.objid OPERATOR(pg_catalog.=) w.objid AND h.objsubid OPERATOR(pg_catalog.=) w.objsubid
LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid OPERATOR(pg_catalog.=) h.pid
WHERE h.locktype OPERATOR(pg_catalog.=) 'advisory' AND h.granted ORDER BY h.pid LIMIT 20`
	sqlWantedKey = `(SELECT d.oid AS database, '%d'::pg_catalog.oid AS classid, '%d'::pg_catalog.oid AS objid, '%d'::pg_catalog.int2 AS objsubid
	FROM pg_catalog.pg_database d WHERE d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()) w ON true`
	sqlWantedBy = `pg_catalog.pg_locks w ON w.locktype OPERATOR(pg_catalog.=) 'advisory' AND NOT w.granted
	AND w.pid OPERATOR(pg_catalog.=) %d`
)

// holdersOf is the question who has what the attempt waits for.
func (c *Conn) holdersOf(at ledger.Attempt[origin]) string {
	wanted := fmt.Sprintf(sqlWantedBy, int32(c.backendPID.Load()))
	switch k := at.Key; {
	case k.Kind != locksql.KeyNumber:
	case k.Space == locksql.Pair:
		wanted = fmt.Sprintf(sqlWantedKey, uint32(k.Pair[0]), uint32(k.Pair[1]), 2)
	default:
		wanted = fmt.Sprintf(sqlWantedKey, uint32(k.Bigint>>32), uint32(k.Bigint), 1)
	}
	return fmt.Sprintf(sqlHolders, wanted)
}

// watch watches over a connection's waits from beside them: after
// pgadvlock_blocker_after and pgadvlock_wait_warning it asks who holds the lock.
//
// Nearly all waits are over long before. To set a timer for each and stop it again
// wakes up the runtime's poller every time, which takes longer than the wait; so a
// timer that is set stays, and finds out when it goes off what there is to watch.
type watch struct {
	timer *time.Timer // nil until the first wait

	mu  sync.Mutex // guards the rest
	due time.Time  // when the timer goes off; zero: it is not set
	on  bool       // whether there is a wait
	wait
}

// wait is a wait that is watched.
type wait struct {
	span       waitSpan
	waited     *ledger.Attempt[origin]
	tell, warn time.Duration // when the span is told, and when a warning is given; 0: not

	interrupt   context.CancelFunc // ends what runs; nil when nothing does
	interrupted chan struct{}      // closed when it has ended
}

// first is when there is something to do.
func (w *wait) first() time.Time {
	after := min(w.tell, w.warn)
	if after == 0 {
		after = max(w.tell, w.warn)
	}
	return w.span.began.Add(after)
}

// watchWait begins to watch over a wait, where there is something to do. The watch
// must be stopped when the wait has ended.
func (c *Conn) watchWait(span waitSpan) *watch {
	i := slices.IndexFunc(span.attempts, func(at ledger.Attempt[origin]) bool { return at.Func.Blocking() })
	if i < 0 || c.pgx == nil {
		return nil
	}
	var tell, warn time.Duration
	if span.IsRecording() {
		tell = c.connector.settings.blockerAfter
	}
	if c.connector.discipline.level(RuleLongWait) > LevelOff {
		warn = c.connector.settings.waitWarning
	}
	if tell == 0 && warn == 0 {
		return nil
	}
	if c.watch == nil {
		c.watch = &watch{}
	}
	w := c.watch
	w.mu.Lock()
	defer w.mu.Unlock()
	w.on, w.wait = true, wait{span: span, waited: &span.attempts[i], tell: tell, warn: warn}
	w.set(w.first())
	return w
}

// set sets the timer, unless it goes off before.
func (w *watch) set(due time.Time) {
	switch {
	case !w.due.IsZero() && !due.Before(w.due):
		return
	case w.timer == nil:
		w.timer = time.AfterFunc(time.Until(due), w.goOff)
	default:
		w.timer.Reset(time.Until(due))
	}
	w.due = due
}

// stop ends the watch over the wait. Nothing of it runs any more when it returns.
func (w *watch) stop() {
	if w == nil {
		return
	}
	w.mu.Lock()
	interrupt, interrupted := w.interrupt, w.interrupted
	w.on = false
	w.mu.Unlock()
	if interrupt != nil {
		interrupt()
		<-interrupted
	}
	w.wait = wait{} // what it refers to is not kept
}

// close is for the end of the connection.
func (w *watch) close() {
	if w != nil && w.timer != nil {
		w.timer.Stop() // if it goes off all the same, there is no wait
	}
}

// goOff is called by the timer.
func (w *watch) goOff() {
	w.mu.Lock()
	w.due = time.Time{}
	if !w.on || w.interrupt != nil { // the timer was set twice
		w.mu.Unlock()
		return
	}
	if first := w.first(); time.Now().Before(first) {
		w.set(first) // an earlier wait's is what went off
		w.mu.Unlock()
		return
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(w.span.ctx))
	defer cancel()
	w.interrupt, w.interrupted = cancel, make(chan struct{})
	w.mu.Unlock()
	defer close(w.interrupted)
	w.watch(ctx)
}

// watch goes through the steps of a wait until it is over.
func (w *wait) watch(ctx context.Context) {
	type step struct {
		after time.Duration
		do    func(context.Context)
	}
	steps := []step{{w.tell, w.tellSpan}, {w.warn, w.warnOfIt}}
	slices.SortStableFunc(steps, func(a, b step) int { return cmp.Compare(a.after, b.after) })
	for _, s := range steps {
		if s.after == 0 {
			continue
		}
		if !sleepUntil(ctx, w.span.began.Add(s.after)) {
			return
		}
		s.do(ctx)
	}
}

func (w *wait) tellSpan(ctx context.Context) {
	if holders, err := w.span.conn.holders(ctx, *w.waited); err == nil && ctx.Err() == nil {
		w.span.blocked(holders)
	}
}

func (w *wait) warnOfIt(ctx context.Context) {
	holders, err := w.span.conn.holders(ctx, *w.waited)
	if ctx.Err() == nil {
		_ = w.span.conn.object(ctx, RuleLongWait, []Lock{attemptedLock(*w.waited)}, w.waited.Origin.caller, heldBy(holders, err)) // nobody to refuse
	}
}

// heldBy says who holds a lock, as the reason of a report.
func heldBy(holders []holder, err error) error {
	if err != nil {
		return fmt.Errorf("who holds it could not be found out: %w", err)
	}
	if len(holders) == 0 {
		return errors.New("nobody holds it now: others wait before it")
	}
	words := make([]string, len(holders))
	for i, h := range holders {
		words[i] = h.String()
	}
	return errors.New("held by " + strings.Join(words, "; "))
}

func sleepUntil(ctx context.Context, t time.Time) bool {
	timer := time.NewTimer(time.Until(t))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// holders asks, on a connection of its own, who holds the lock that the
// connection waits for. One such connection is open at a time for a Connector,
// and none when nobody asks. It may run beside a statement on the connection
// itself, so it touches nothing of it that changes.
func (c *Conn) holders(ctx context.Context, waited ledger.Attempt[origin]) (holders []holder, err error) {
	defer func() {
		if ctx.Err() == nil {
			c.connector.metrics.lookedUp(ctx, err)
		}
	}()
	select {
	case c.connector.asking <- struct{}{}:
		defer func() { <-c.connector.asking }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	bounded, cancel := context.WithTimeout(ctx, c.connector.settings.resetTimeout)
	defer cancel()
	conn, err := c.dialAgain(bounded)
	if err != nil {
		return nil, err
	}
	defer func() {
		_ = conn.Close(bounded) // the answer is there, or the error is
		<-conn.CleanupDone()
	}()
	results, err := conn.Exec(bounded, c.holdersOf(waited)).ReadAll()
	if err != nil {
		return nil, err
	}
	for _, row := range results[0].Rows {
		pid, _ := strconv.ParseInt(string(row[0]), 10, 64) // an int4 column
		h := holder{pid: uint32(pid), mode: modeOf(string(row[1]) == "ShareLock"), application: string(row[2]), address: string(row[3]), state: string(row[4])}
		if seconds, err := strconv.ParseFloat(string(row[5]), 64); err == nil {
			h.since = time.UnixMicro(int64(seconds * 1e6))
		}
		h.span = c.connector.holdOf(h.pid, lockOfRow([]string{string(row[6]), string(row[7]), string(row[8]), string(row[1])}))
		holders = append(holders, h)
	}
	return holders, nil
}

// holdOf finds the span of a lock that a connection of this Connector holds: by
// its number, or as the only one of its mode and key space there.
func (c *Connector) holdOf(pid uint32, lock Lock) trace.Span {
	for _, cn := range c.connections() {
		if cn.backendPID.Load() != pid {
			continue
		}
		var alike []trace.Span
		for _, l := range cn.ledger.Held() {
			held := publicLock(l)
			switch {
			case held.Mode != lock.Mode || held.Key.space != lock.Key.space:
			case held.Key == lock.Key:
				return l.Origin.hold
			case !held.Key.number:
				alike = append(alike, l.Origin.hold)
			}
		}
		if len(alike) == 1 {
			return alike[0]
		}
	}
	return nil
}
