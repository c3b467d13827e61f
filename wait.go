package pgadvlock

// This file owns what waiting can do to a lock: how long it may take, in which
// order keys are waited for, and what became of a lock whose wait ended in an
// error.

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/pgadvlock/pgadvlock/internal/ledger"
	"github.com/pgadvlock/pgadvlock/internal/lockorder"
	"github.com/pgadvlock/pgadvlock/internal/locksql"
)

// orderDepth is how many of the locks held are looked at for their order.
const orderDepth = 16

// orderGraph is the orders that a Connector's sessions wait in.
type orderGraph = lockorder.Graph[locksql.Key, Caller]

// admitOrder enters the order of a statement's waits in the connector's graph,
// and objects to one that is the opposite of an earlier one.
func (c *Conn) admitOrder(ctx context.Context, attempts []ledger.Attempt[origin], caller Caller) error {
	if c.connector.discipline.level(RuleLockOrder) == LevelOff {
		return nil
	}
	var held []lockorder.Lock[locksql.Key, Caller]
	for _, l := range c.ledger.Recent(orderDepth) {
		held = append(held, orderedLock(l))
	}
	for _, at := range attempts {
		if at.Func.Release() || at.Key.Kind == locksql.KeyUnknown || at.Key.Kind == locksql.KeyNull {
			continue
		}
		wanted := lockorder.Lock[locksql.Key, Caller]{Key: at.Key, Share: at.Func.Share(), Site: at.Origin.caller}
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
		held = append(held, wanted) // of a statement with several calls
	}
	return nil
}

func orderedLock(l ledger.Lock[origin]) lockorder.Lock[locksql.Key, Caller] {
	return lockorder.Lock[locksql.Key, Caller]{Key: l.Key, Share: l.Share, Site: l.Origin.caller}
}

func orderLock(l lockorder.Lock[locksql.Key, Caller]) Lock {
	lock := Lock{Key: publicKey(l.Key), Caller: l.Site}
	if l.Share {
		lock.Mode = ShareLock
	}
	return lock
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
const sqlLimit = "SELECT pg_catalog.current_setting('lock_timeout'), pg_catalog.set_config('lock_timeout'," +
	" CASE WHEN pg_catalog.date_part('epoch', pg_catalog.current_setting('lock_timeout')::pg_catalog.interval)" +
	" OPERATOR(pg_catalog.*) 1000::pg_catalog.float8 BETWEEN 1::pg_catalog.float8 AND %[1]d::pg_catalog.float8" +
	" THEN pg_catalog.current_setting('lock_timeout') ELSE '%[1]d' END, true)"

// limitWait bounds the waits of a statement that is about to be sent. It must
// be followed by done.
func (c *Conn) limitWait(ctx context.Context, attempts []ledger.Attempt[origin]) (*limit, error) {
	bound := c.connector.settings.maxWait
	waits := false
	for _, at := range attempts {
		waits = waits || at.Func.Blocking()
	}
	// Statement pooling knows no transactions, so there is nowhere to put it.
	if bound == 0 || !waits || c.poolMode() == PoolStatement {
		return nil, nil
	}
	if c.pgx != nil && (c.gone() || c.busy() || c.pgx.PgConn().TxStatus() == 'E') {
		return nil, nil // the statement itself will say so
	}
	l := &limit{conn: c, began: !c.inTransaction()}
	sql := fmt.Sprintf(sqlLimit, bound.Milliseconds())
	if l.began {
		if c.pgx == nil {
			if err := c.send(ctx, "BEGIN"); err != nil {
				return nil, err
			}
		} else {
			sql = "BEGIN; " + sql
		}
		c.inTx = true
	}
	rows, err := c.query(ctx, sql)
	if err == nil && (len(rows) != 1 || len(rows[0]) != 2) {
		err = errors.New("lock_timeout was not told")
	}
	if err != nil {
		if l.began {
			_ = c.endLimit(ctx, "ROLLBACK")
		}
		return nil, fmt.Errorf("pgadvlock: pgadvlock_max_wait: %w", err)
	}
	l.restore, l.ours = rows[0][0], rows[0][0] != rows[0][1]
	return l, nil
}

// done puts lock_timeout back. A statement that failed has failed its
// transaction, whose end, or whose ROLLBACK TO, puts it back; one that was
// begun for it is ended.
func (l *limit) done(ctx context.Context, err error) error {
	const lockNotAvailable = "55P03"
	switch {
	case l == nil:
		return err
	case err == nil && l.began:
		return l.conn.endLimit(ctx, "COMMIT")
	case err == nil:
		return l.conn.send(ctx, "SELECT pg_catalog.set_config('lock_timeout', '"+l.restore+"', true)")
	case l.began && !l.conn.gone():
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.conn.connector.settings.resetTimeout)
		defer cancel()
		_ = l.conn.endLimit(ctx, "ROLLBACK") // a failure closes the connection; the caller hears of the lock
	}
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
	rows, err := c.query(ctx, sqlReport)
	if err != nil {
		return nil // still in doubt: the return to the pool will release
	}
	granted, sure := c.granted(doubts, rows)
	if !sure {
		return nil
	}
	var kept []ledger.Attempt[origin]
	for _, g := range granted {
		lock := attemptedLock(g.attempt)
		lock.Key, lock.Count = g.key, 1
		err := g.attempt.Origin.err
		if c.observes() {
			kept = append(kept, g.attempt)
		} else if releaseErr := c.send(ctx, g.unlock()); releaseErr != nil {
			return nil // still in doubt
		} else {
			lock.Count = 0
		}
		if e := c.object(ctx, RuleGrantedAfterError, []Lock{lock}, g.attempt.Origin.caller, err); e != nil && objection == nil {
			objection = e
		}
	}
	c.ledger.Resolve(kept)
	return objection
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
		k := kind{at.Key.Space, attemptedLock(at).Mode}
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
	if !c.gone() || c.ledger.State() == ledger.Clean {
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
		_ = c.object(ctx, RuleLostLock, locks, Caller{}, err)
	}
	c.ledger.Returned()
	c.rearm()
}

// unboundedWait reports whether nothing of the caller's or ours ends a wait.
func (c *Conn) unboundedWait(ctx context.Context) bool {
	_, deadline := ctx.Deadline()
	return !deadline && c.connector.settings.maxWait == time.Duration(0)
}
