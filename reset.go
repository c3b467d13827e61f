package pgadvlock

//lint:file-ignore SA1019 Drivers that have nothing newer must keep working, as they do on database/sql.

// This file owns the return to the pool: what a connection must not keep, how
// it is taken away, and when the connection is given up instead.
//
// database/sql calls IsValid when a connection comes back, before it becomes
// idle or goes to the next waiter; that is the only hook there is. It runs
// under the connection's own lock, without a context and without a way to
// return an error, and a panic in it would lose the pool slot for ever.

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pgadvlock/pgadvlock/internal/ledger"
	"github.com/pgadvlock/pgadvlock/internal/locksql"
)

// Names and operators are qualified: with a hostile search_path an unqualified
// pg_advisory_unlock_all() runs whatever stands first in it.
const (
	sqlRelease = "SELECT pg_catalog.pg_advisory_unlock_all()"
	sqlReport  = "SELECT l.classid, l.objid, l.objsubid, l.mode FROM pg_catalog.pg_locks l" +
		" WHERE l.locktype OPERATOR(pg_catalog.=) 'advisory' AND l.granted" +
		" AND l.pid OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid()"

	// reportEvery is how often a connector reads pg_locks for a report:
	// reading it takes every partition of the server's lock manager.
	reportEvery = time.Second
)

// IsValid implements driver.Validator.
func (c *Conn) IsValid() bool {
	c.judged, c.sent = true, false
	if !c.armed && c.connector.settings.resetWhen == ResetDirty && c.idle() {
		return c.validator == nil || c.validator.IsValid()
	}
	return c.giveBack()
}

// ResetSession implements driver.SessionResetter. It is the second line: a
// connection that is dirty here was not seen by IsValid, because a middleware
// outside does not forward it.
func (c *Conn) ResetSession(ctx context.Context) error {
	hidden := !c.judged
	c.judged, c.sent = false, false
	if hidden && (c.armed || c.connector.settings.resetWhen == ResetAlways) {
		if c.ledger.State() != ledger.Clean {
			c.report(ctx, RuleReturnHookHidden, c.sessionLocks(), nil)
		}
		if !c.giveBack() {
			return driver.ErrBadConn
		}
	}
	if r, ok := c.inner.(driver.SessionResetter); ok {
		return r.ResetSession(ctx)
	}
	return nil
}

// idle reports whether the connection is alive, answers nothing at the moment
// and has no transaction open. pgx alone would have a connection dropped that
// is not: having a Validator makes database/sql ask it instead.
func (c *Conn) idle() bool {
	if c.pgx == nil {
		return !c.inTx
	}
	pg := c.pgx.PgConn()
	// In this order: the transaction status is stale on a busy or closed one.
	return !pg.IsClosed() && !pg.IsBusy() && pg.TxStatus() == 'I'
}

// giveBack takes away what the connection must not keep and reports whether it
// may stay in the pool. It may be called twice with no use in between.
func (c *Conn) giveBack() (keep bool) {
	ctx, cancel := context.WithTimeout(context.Background(), c.connector.settings.resetTimeout)
	defer cancel()
	defer func() {
		if p := recover(); p != nil {
			// Nothing of ours is known to panic; a driver underneath may.
			c.connector.logger().Error("pgadvlock: panic while a connection was returned to the pool; it is closed", "panic", p)
			c.giveUp(ctx)
			keep = false
		}
	}()
	defer c.rearm()

	c.mourn(ctx, nil)
	if c.gone() {
		return false
	}
	_ = c.settleDoubts(ctx) // of an earlier statement
	state := c.ledger.State()
	always := c.connector.settings.resetWhen == ResetAlways
	usable := c.idle()
	if state == ledger.Clean && !always {
		if !usable && !c.busy() && !c.observes() && len(c.ledger.Recent(1)) > 0 {
			// The connection is dropped, as pgx would; its transaction locks
			// need not wait until the server notices.
			_ = c.send(ctx, "ROLLBACK")
			c.giveUp(ctx)
			return false
		}
		if usable {
			c.ledger.EndTransaction() // what ended unseen, as through a prepared COMMIT
		}
		return usable && c.innerValid()
	}
	if c.observes() {
		c.observe(ctx, state)
		return usable && c.innerValid()
	}
	if c.busy() {
		// Nothing can be sent before rows that were left open are read.
		c.report(ctx, RuleLeakedSessionLock, c.sessionLocks(), errors.New("the connection was left with rows open and is closed"))
		c.giveUp(ctx)
		return false
	}
	if !usable {
		if err := c.send(ctx, "ROLLBACK"); err != nil {
			if c.wasLost(ctx, err) {
				return false
			}
			c.report(ctx, RuleLeakedSessionLock, c.sessionLocks(), fmt.Errorf("rollback: %w; the connection is closed", err))
			c.giveUp(ctx)
			return false
		}
		c.transactionEnded()
	}
	keep = c.clean(ctx, state, usable)
	if !keep || !usable {
		// Also where a ROLLBACK made it usable: pgx would have had it dropped.
		c.giveUp(ctx)
		return false
	}
	c.ledger.Returned(ledger.Leaked)
	return c.innerValid()
}

// wasLost reports whether the connection turned out to be broken, and with it
// the locks lost: before the return or by then, nobody can tell. One that we
// gave up because it did not answer in time may hold them still.
func (c *Conn) wasLost(ctx context.Context, err error) bool {
	if ctx.Err() != nil || !c.gone() || len(c.sessionLocks()) == 0 {
		return false
	}
	c.lose(ctx, err)
	return true
}

// clean releases what the session holds, where that is safe, and reports it.
// It returns false when the connection must be closed instead; stays is false
// when it will be closed in any case.
func (c *Conn) clean(ctx context.Context, state ledger.State, stays bool) bool {
	_ = c.askPoolMode(ctx) // a connection that it broke shows as one whose mode is not known
	locks, holds := c.sessionLocks(), c.holds()
	switch mode := c.poolMode(); mode {
	case PoolDirect, PoolSession:
	case PoolTransaction, PoolStatement:
		// The backend that holds the locks is not ours now, and the one that
		// a release would reach is somebody else's.
		if state == ledger.Tainted || len(locks) > 0 {
			c.report(ctx, RuleLeakedSessionLock, locks, fmt.Errorf("behind a pooler in %s mode it cannot be released", mode))
		}
		return true
	default:
		if state == ledger.Escaped || state == ledger.Clean {
			return true // nothing is known to be held
		}
		c.report(ctx, RuleLeakedSessionLock, locks, errors.New("it is not known whether a pooler stands before the server, so the connection is closed instead of cleaned"))
		return false
	}
	unnumbered := slices.ContainsFunc(locks, func(l Lock) bool { return !l.Key.number })
	ask := (state != ledger.Exact || unnumbered) && c.connector.mayReadLocks()
	discard := stays && c.connector.settings.reset == ResetDiscardAll
	found, err := c.release(ctx, ask, discard)
	c.connector.metrics.reset(ctx, discard, err)
	if found != nil {
		locks = c.explain(found)
	}
	if err != nil && c.wasLost(ctx, err) {
		return false
	}
	if err != nil {
		err = fmt.Errorf("releasing it: %w; the connection is closed", err)
	}
	if len(locks) > 0 || err != nil {
		c.reportOn(ctx, holds, RuleLeakedSessionLock, locks, err)
	}
	return err == nil && (c.connector.settings.reset != ResetClose || state == ledger.Clean)
}

// observe reports what a reset would release, and leaves it.
func (c *Conn) observe(ctx context.Context, state ledger.State) {
	locks := c.sessionLocks()
	if state != ledger.Exact && c.idle() {
		_ = c.askPoolMode(ctx) // only a report is at stake
		if mode := c.poolMode(); (mode == PoolDirect || mode == PoolSession) && c.connector.mayReadLocks() {
			found, err := c.query(ctx, sqlReport, 0)
			switch {
			case err != nil: // the ledger's word then
			case len(found) == 0:
				c.ledger.Returned(ledger.Lost) // the account was wrong: nothing is held
				return
			default:
				locks = c.explain(found)
			}
		}
	}
	// Once a leak: the connection comes back with it again and again.
	told := describeLocks(locks, time.Time{})
	if len(locks) > 0 && told != c.toldLeak {
		c.report(ctx, RuleLeakedSessionLock, locks, nil)
	}
	c.toldLeak = told
}

// release gives all session locks back, after reading which they are when
// asked to. found is nil when they were not read.
func (c *Conn) release(ctx context.Context, ask, discard bool) (found [][]string, err error) {
	if ask && c.pgx != nil && !discard {
		if found, err = c.query(ctx, sqlReport+"; "+sqlRelease, 0); err == nil { // one round trip
			return found, nil
		}
	} else if ask {
		found, _ = c.query(ctx, sqlReport, 0)
	}
	// A report that failed, for want of privilege or of another reason, must
	// not keep the release.
	if discard {
		return found, c.discard(ctx)
	}
	return found, c.send(ctx, sqlRelease)
}

// discard resets the session as a whole. DISCARD ALL drops prepared statements
// behind pgx's back, where cached ones would fail once and a db.Prepare'd one
// for ever, so pgx is made to forget them. It cannot share its round trip: it
// is refused in a text with other statements (25001).
func (c *Conn) discard(ctx context.Context) error {
	if err := c.send(ctx, "DISCARD ALL"); err != nil {
		return err
	}
	c.ledger.Returned(ledger.Leaked)
	c.ledger.After([]locksql.Step{{Kind: locksql.StepDiscardAll}})
	c.defaultIsolation = c.startIsolation
	if err := c.pgx.DeallocateAll(ctx); err != nil {
		return err
	}
	if also := c.deadPeerSettings(); len(also) > 0 && c.poolMode() == PoolDirect && c.asked != (time.Time{}) {
		if err := c.send(ctx, "SELECT "+strings.Join(also, ", ")); err != nil {
			return err
		}
	}
	if hook := c.connector.settings.afterConnect; hook != nil {
		if err := hook(ctx, c.pgx); err != nil {
			return fmt.Errorf("WithAfterConnect's hook: %w", err)
		}
		if err := c.send(ctx, sqlRelease); err != nil { // of locks that the hook took
			return err
		}
	}
	return nil
}

// send executes SQL of our own on the inner connection, past the caller's
// tracers.
func (c *Conn) send(ctx context.Context, sql string) error {
	if c.pgx != nil {
		_, err := c.pgx.PgConn().Exec(ctx, sql).ReadAll()
		return err
	}
	_, err := c.execer.ExecContext(ctx, sql, nil)
	if !errors.Is(err, driver.ErrSkip) {
		return err
	}
	inner, err := c.preparer.PrepareContext(ctx, sql)
	if err != nil {
		return err
	}
	defer inner.Close()
	_, err = (&stmt{Stmt: inner}).sendExec(ctx, nil)
	return err
}

// query is send for SQL of which the nth statement returns rows, counted from
// 0; they are not nil when err is. Several statements take pgx.
func (c *Conn) query(ctx context.Context, sql string, nth int) (found [][]string, err error) {
	found = [][]string{}
	if c.pgx != nil {
		results, err := c.pgx.PgConn().Exec(ctx, sql).ReadAll()
		if err != nil {
			return nil, err
		}
		for _, row := range results[nth].Rows {
			text := make([]string, len(row))
			for i, v := range row {
				text[i] = string(v)
			}
			found = append(found, text)
		}
		return found, nil
	}
	rows, err := c.queryer.QueryContext(ctx, sql, nil)
	if errors.Is(err, driver.ErrSkip) {
		inner, prepareErr := c.preparer.PrepareContext(ctx, sql)
		if prepareErr != nil {
			return nil, prepareErr
		}
		defer inner.Close()
		rows, err = (&stmt{Stmt: inner}).sendQuery(ctx, nil)
	}
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	dest := make([]driver.Value, len(rows.Columns()))
	for {
		if err := rows.Next(dest); err == io.EOF {
			return found, nil
		} else if err != nil {
			return nil, err
		}
		text := make([]string, len(dest))
		for i, v := range dest {
			if b, ok := v.([]byte); ok {
				text[i] = string(b)
			} else {
				text[i] = fmt.Sprint(v)
			}
		}
		found = append(found, text)
	}
}

// sessionLocks returns the session locks in the ledger.
func (c *Conn) sessionLocks() []Lock {
	var locks []Lock
	for _, l := range c.ledger.Held() {
		if !l.Xact {
			locks = append(locks, publicLock(l))
		}
	}
	return locks
}

// explain turns rows of sqlReport into locks, with what the ledger knows of
// each. pg_locks has one row for a lock however often it was taken. A lock that
// the ledger knows by its expression is found by elimination: when it is the
// only one left of its mode and key space.
func (c *Conn) explain(rows [][]string) []Lock {
	known := c.sessionLocks()
	take := func(match func(Lock) bool) (l Lock, ok bool) {
		i := slices.IndexFunc(known, match)
		if i < 0 {
			return Lock{}, false
		}
		l = known[i]
		known = slices.Delete(known, i, i+1)
		return l, true
	}
	locks := make([]Lock, len(rows))
	var left []int
	for i, row := range rows {
		locks[i] = lockOfRow(row)
		if l, ok := take(func(l Lock) bool { return l.Key == locks[i].Key && l.Mode == locks[i].Mode }); ok {
			locks[i] = l
		} else {
			left = append(left, i)
		}
	}
	for _, i := range left {
		alike := func(l Lock) bool { return l.Mode == locks[i].Mode && l.Key.space == locks[i].Key.space }
		rivals := slices.ContainsFunc(left, func(j int) bool { return j != i && alike(locks[j]) })
		l, ok := take(func(l Lock) bool { return alike(l) && !l.Key.number })
		if !ok || rivals || slices.ContainsFunc(known, func(l Lock) bool { return alike(l) && !l.Key.number }) {
			continue
		}
		expr := l.Key.text
		l.Key = locks[i].Key
		l.Key.text += " = " + expr
		locks[i] = l
	}
	return locks
}

// lockOfRow reads classid, objid, objsubid and mode as the manual's description
// of pg_locks says: objsubid 1 is a bigint in two halves, 2 is two ints.
func lockOfRow(row []string) Lock {
	high, _ := strconv.ParseUint(row[0], 10, 32) // oid columns: always in range
	low, _ := strconv.ParseUint(row[1], 10, 32)
	key := locksql.Key{Kind: locksql.KeyNumber, Bigint: int64(high<<32 | low)}
	if row[2] == "2" {
		key = locksql.Key{Space: locksql.Pair, Kind: locksql.KeyNumber, Pair: [2]int32{int32(high), int32(low)}}
	}
	return Lock{Key: publicKey(key), Mode: modeOf(row[3] == "ShareLock")}
}

// report is object for what is found about the connection's session locks, where
// there is nobody to refuse, and often no caller's span to tell it: the spans of
// the locks do.
func (c *Conn) report(ctx context.Context, r Rule, locks []Lock, err error) {
	c.reportOn(ctx, c.holds(), r, locks, err)
}

// reportOn is report after the ledger has lost sight of the locks.
func (c *Conn) reportOn(ctx context.Context, holds []hold, r Rule, locks []Lock, err error) {
	_ = c.objectOn(ctx, holds, r, locks, Caller{}, err)
}

// mayReadLocks rations the reading of pg_locks.
func (c *Connector) mayReadLocks() bool {
	now := time.Now().UnixNano()
	last := c.reports.Load()
	return (last == 0 || now-last >= int64(reportEvery)) && c.reports.CompareAndSwap(last, now)
}

// observes reports whether nothing may be released.
func (c *Conn) observes() bool {
	return c.connector.settings.reset == ResetOff || c.connector.discipline.observing()
}

func (c *Conn) gone() bool { return c.pgx != nil && c.pgx.IsClosed() }
func (c *Conn) busy() bool { return c.pgx != nil && c.pgx.PgConn().IsBusy() }

func (c *Conn) innerValid() bool { return c.validator == nil || c.validator.IsValid() }

// giveUp closes the pgx connection itself: over a pgxpool, closing the inner
// driver.Conn would hand the connection with its locks back to that pool. The
// server frees what is still held when it notices, some milliseconds later, so
// whoever can release first does.
func (c *Conn) giveUp(ctx context.Context) {
	c.connector.metrics.gaveUp(ctx)
	if c.pgx != nil {
		_ = c.pgx.Close(ctx) // there is no other way to end it, and nobody to tell
	}
	c.ledger.Returned(ledger.Leaked)
	c.rearm()
}

// abandon ends a connection that database/sql closes while its ledger is not
// clean: because a driver.ErrBadConn came from it, as pgx's Exec has it for a
// context that had ended, after a panic in Raw, or where nothing may be
// released. The server takes its time to notice that a connection was closed,
// so the locks of a session that is alive are released first. A driver that is
// not pgx's does not tell whether it is.
func (c *Conn) abandon() {
	switch {
	case c.holdsNothing():
	case c.pgx == nil || c.observes():
		c.lose(context.Background(), errors.New("the connection was closed"))
	default:
		_ = c.giveBack() // it is closed in any case
	}
}
