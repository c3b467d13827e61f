package pgadvlock

// This file owns the discipline: which rules there are, how strict each is,
// how a statement is judged, and what a finding says. It sends nothing; the
// evidence is brought to it.

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/pgadvlock/pgadvlock/internal/ledger"
	"github.com/pgadvlock/pgadvlock/internal/locksql"
)

// Rule names a rule. It is an error, so that a program can ask
// errors.Is(err, [RulePooledSessionLock]), as with syscall.Errno. docs/rules.md
// has a section for each, with the wrong code, what becomes of it on plain
// pgx, and the right code.
type Rule string

const (
	// RulePooledSessionLock: a plain statement that takes or releases a
	// session lock was sent through *sql.DB. When the call returns, its
	// connection goes back into the pool, so the lock guards nothing, and an
	// unlock reaches whichever connection is free.
	//
	// See docs/rules.md#pooled-session-lock.
	RulePooledSessionLock Rule = "pooled-session-lock"
	// RuleTransactionPooling: a session-level function behind a pooler in
	// transaction or statement mode, where every transaction may get another
	// backend.
	//
	// See docs/rules.md#transaction-pooling.
	RuleTransactionPooling Rule = "transaction-pooling"
	// RuleUnprovenPooling: a session lock through something whose pool mode
	// could not be found out.
	//
	// See docs/rules.md#unproven-pooling.
	RuleUnprovenPooling Rule = "unproven-pooling"
	// RuleLeakedSessionLock: a connection came back into the pool, or was
	// closed by database/sql, while it held a session lock. The lock is released as well (see [WithReset]).
	// At LevelError it acts as at LevelWarn: there is nobody to refuse.
	//
	// See docs/rules.md#leaked-session-lock.
	RuleLeakedSessionLock Rule = "leaked-session-lock"
	// RuleUnlockNotHeld: pg_advisory_unlock answered false, because of a wrong
	// key, mode or key space, or because another connection holds the lock.
	// At LevelError the statement returns a *RuleError after the fact.
	//
	// See docs/rules.md#unlock-not-held.
	RuleUnlockNotHeld Rule = "unlock-not-held"
	// RuleGrantedAfterError: the caller got an error, such as a lock_timeout,
	// and the session got the lock all the same. It is released at once unless
	// it was held before. At LevelError a *RuleError is returned, with the
	// server's error in it.
	//
	// See docs/rules.md#granted-after-error.
	RuleGrantedAfterError Rule = "granted-after-error"
	// RuleLostLock: the connection broke or was closed while it held session
	// locks, which is told at its next use or at its end. At LevelError it acts
	// as at LevelWarn.
	//
	// See docs/rules.md#lost-lock.
	RuleLostLock Rule = "lost-lock"
	// RuleXactLockAutocommit: a transaction lock outside a transaction, which
	// is released before the call returns. Not judged for the try forms, which
	// ask a legitimate question.
	//
	// See docs/rules.md#xact-lock-autocommit.
	RuleXactLockAutocommit Rule = "xact-lock-autocommit"
	// RuleSnapshotBeforeLock: a wait for a transaction lock under REPEATABLE
	// READ. What is read after it is read from the snapshot taken before it.
	//
	// See docs/rules.md#snapshot-before-lock.
	RuleSnapshotBeforeLock Rule = "snapshot-before-lock"
	// RuleLockOrder: two keys are waited for in opposite orders, or a share lock
	// is upgraded to an exclusive one: a deadlock, found without one.
	//
	// See docs/rules.md#lock-order.
	RuleLockOrder Rule = "lock-order"
	// RuleLockPerRow: a lock function is evaluated for the rows of a table, so
	// that it may lock for rows which LIMIT or WHERE drops. Rows that the
	// statement makes itself, as FROM unnest($1) does, count only where it may
	// drop some.
	//
	// See docs/rules.md#lock-per-row.
	RuleLockPerRow Rule = "lock-per-row"
	// RuleReturnHookHidden: a middleware between database/sql and pgadvlock
	// does not forward driver.Validator, so that locks are released only when
	// the connection is handed out again. At LevelError it acts as at LevelWarn.
	//
	// See docs/rules.md#return-hook-hidden.
	RuleReturnHookHidden Rule = "return-hook-hidden"
	// RuleUnboundedWait: a wait that neither the context nor [WithMaxWait] ends.
	//
	// See docs/rules.md#unbounded-wait.
	RuleUnboundedWait Rule = "unbounded-wait"
	// RuleLongWait: a wait longer than [WithWaitWarning], with those who hold
	// the lock in the event's Err. At LevelError it acts as at LevelWarn.
	//
	// See docs/rules.md#long-wait.
	RuleLongWait Rule = "long-wait"
	// RuleWeakKey: a key made by the 32-bit hashtext(). Of 77,000 different
	// names two have the same key with even odds.
	//
	// See docs/rules.md#weak-key.
	RuleWeakKey Rule = "weak-key"
)

// Error returns the rule's name.
func (r Rule) Error() string { return string(r) }

// Level is how strict a rule is. The zero value is LevelOff.
type Level uint8

const (
	LevelOff   Level = iota // not judged
	LevelWarn               // reported
	LevelError              // refused before it is sent, or returned as an error after the fact
)

// String returns "off", "warn" or "error".
func (l Level) String() string {
	return [...]string{"off", "warn", "error"}[min(l, LevelError)]
}

// Preset is a level for every rule. The zero value is PresetEnforce.
type Preset uint8

const (
	// PresetEnforce refuses what cannot work and reports what is suspicious:
	// the levels in docs/rules.md.
	PresetEnforce Preset = iota
	// PresetObserve reports and changes nothing: no statement is refused,
	// nothing is released, whatever the other settings say. For a first
	// roll-out.
	PresetObserve
	// PresetStrict refuses what PresetEnforce reports, and reports what it
	// lets pass. For tests.
	PresetStrict
)

// String returns "enforce", "observe" or "strict".
func (p Preset) String() string {
	return [...]string{"enforce", "observe", "strict"}[min(p, PresetStrict)]
}

// ruleRow is what there is to know of a rule.
type ruleRow struct {
	rule            Rule
	enforce, strict Level
	why             string // completes "<locks> ..."
	fix             string // what to write instead
}

// ruleTable is the one list of rules.
var ruleTable = []ruleRow{
	{RulePooledSessionLock, LevelError, LevelError,
		"was sent through *sql.DB: its connection goes back into the pool when the call returns, so the lock would guard nothing, and an unlock would reach any connection",
		"take a *sql.Conn with db.Conn(ctx), lock and unlock on it and Close it, or use pg_advisory_xact_lock in a transaction"},
	{RuleTransactionPooling, LevelError, LevelError,
		"was sent through a pooler that gives every transaction another backend: the lock would stay with a backend that others use",
		"use pg_advisory_xact_lock in a transaction, or a DSN that goes to PostgreSQL directly or through a pool in session mode; if the proxy pins connections that hold a lock, set pgadvlock_pool_mode=session"},
	{RuleUnprovenPooling, LevelWarn, LevelError,
		"was sent through something whose pool mode could not be found out",
		"say what it is with pgadvlock_pool_mode: direct, session, transaction or statement"},
	{RuleLeakedSessionLock, LevelWarn, LevelWarn,
		"was still held when the connection went back into the pool",
		"unlock it on the same *sql.Conn before Close, or use pg_advisory_xact_lock, which ends with the transaction"},
	{RuleUnlockNotHeld, LevelWarn, LevelError,
		"was to be unlocked, but this session does not hold it",
		"lock and unlock on one *sql.Conn, with the same key, key space and mode"},
	{RuleGrantedAfterError, LevelWarn, LevelError,
		"was granted although the statement failed",
		"nothing has to be done: it was released"},
	{RuleLostLock, LevelWarn, LevelWarn,
		"was lost with its connection",
		"check at the end of the work that the connection is alive, or guard the work's effect in the database"},
	{RuleXactLockAutocommit, LevelWarn, LevelError,
		"was taken outside a transaction, so it was released before the call returned",
		"take it on a *sql.Tx, and do the work in that transaction"},
	{RuleSnapshotBeforeLock, LevelWarn, LevelError,
		"was waited for under REPEATABLE READ: what the transaction reads now is from before the wait",
		"use READ COMMITTED, or take a session lock before the transaction begins"},
	{RuleLockOrder, LevelWarn, LevelError,
		"", // see orders
		"take the keys in one order everywhere, smallest first, or take one lock that covers both"},
	{RuleLockPerRow, LevelWarn, LevelError,
		"is evaluated for the rows of a table, so rows that LIMIT or WHERE drops may be locked too",
		"choose the rows in a subquery first (SELECT pg_advisory_lock(id) FROM (SELECT id ... LIMIT n OFFSET 0) AS chosen), or lock one key at a time"},
	{RuleReturnHookHidden, LevelWarn, LevelWarn,
		"was held until now: the connection was handed out again without having been cleaned at its return",
		"put pgadvlock outside the other driver wrapper, or use a wrapper that forwards driver.Validator"},
	{RuleLongWait, LevelWarn, LevelWarn,
		"has been waited for longer than pgadvlock_wait_warning",
		"look at who holds it; pg_terminate_backend(pid) frees it"},
	{RuleUnboundedWait, LevelOff, LevelWarn,
		"is waited for without an end",
		"use a context with a deadline, or set pgadvlock_max_wait"},
	{RuleWeakKey, LevelOff, LevelWarn,
		"has a key of 32 bits: of 77,000 different names two collide with even odds",
		"use hashtextextended(name, 0)"},
}

func (r Rule) row() ruleRow {
	for _, row := range ruleTable {
		if row.rule == r {
			return row
		}
	}
	return ruleRow{}
}

// fix is what to write instead, and where to read more.
func (r Rule) fix() string {
	return r.row().fix + " (docs/rules.md#" + string(r) + ")"
}

func (r Rule) known() bool { return r.row().rule != "" }

func ruleNames() []string {
	names := make([]string, len(ruleTable))
	for i, row := range ruleTable {
		names[i] = string(row.rule)
	}
	return names
}

// sentence says what was found, in one clause without the caller.
func (e Event) sentence() string {
	if e.Rule == RuleLockOrder {
		return e.orders()
	}
	locks := e.Locks
	if e.Rule == RuleUnlockNotHeld && len(locks) > 1 {
		locks = locks[:1]
	}
	s := describeLocks(locks, e.Time)
	if s == "" {
		s = "an advisory lock"
	}
	s += " " + e.Rule.row().why
	if e.Rule == RuleUnlockNotHeld && len(e.Locks) > 1 {
		s += "; it holds " + describeLocks(e.Locks[1:], e.Time)
	}
	return s
}

// orders is the sentence of RuleLockOrder.
func (e Event) orders() string {
	order := func(held, wanted Lock) string {
		return fmt.Sprintf("%s lock %s is waited for while %s lock %s is held", wanted.Mode, wanted.Key, held.Mode, held.Key)
	}
	now := order(e.Locks[0], e.Locks[1])
	if len(e.Locks) < 4 {
		return now + ": two sessions that do this wait for each other"
	}
	return fmt.Sprintf("%s (taken at %s), and elsewhere %s (at %s, taken at %s): two sessions can wait for each other",
		now, e.Locks[0].Caller, order(e.Locks[2], e.Locks[3]), e.Locks[3].Caller, e.Locks[2].Caller)
}

// evidence is what is known of a statement before it is sent.
type evidence struct {
	statement  *locksql.Statement
	attempts   []ledger.Attempt[origin] // nil unless plain
	pooled     bool                     // a method of *sql.DB is on the stack
	autocommit bool                     // no transaction is open, for certain
	isolation  string                   // of the open transaction, "" when not known
	unbounded  bool                     // nothing ends a wait
}

// judge names the rules that the text and the call offend. Where it is not
// certain it says nothing.
func (e evidence) judge() (offended []Rule) {
	plain := e.statement.Form == locksql.Plain
	if plain && e.pooled && e.statement.Session && !selfContained(e.attempts) {
		offended = append(offended, RulePooledSessionLock)
	}
	for _, at := range e.attempts {
		if at.Func.Session() || !at.Func.Blocking() {
			continue
		}
		if e.autocommit {
			offended = append(offended, RuleXactLockAutocommit)
		} else if e.isolation == "repeatable read" {
			offended = append(offended, RuleSnapshotBeforeLock)
		}
		break
	}
	waits := func(at ledger.Attempt[origin]) bool { return at.Func.Blocking() }
	if e.unbounded && slices.ContainsFunc(e.attempts, waits) {
		offended = append(offended, RuleUnboundedWait)
	}
	if e.statement.PerRow {
		offended = append(offended, RuleLockPerRow)
	}
	if slices.ContainsFunc(e.statement.Calls, weak) {
		offended = append(offended, RuleWeakKey)
	}
	return offended
}

func weak(c locksql.Call) bool {
	return !c.Func.Release() && slices.ContainsFunc(c.Args, func(a locksql.Arg) bool { return a.Weak })
}

// selfContained reports whether a statement gives back all that it takes, as
// in SELECT pg_advisory_lock(1), pg_advisory_unlock(1): to wait for a holder
// and hold nothing afterwards is right on any connection.
func selfContained(attempts []ledger.Attempt[origin]) bool {
	type line struct {
		key   locksql.Key
		share bool
	}
	taken := map[line]int{}
	for _, at := range attempts {
		l := line{at.Key, at.Func.Share()}
		switch {
		case !at.Func.Session():
		case at.Func == locksql.UnlockAll:
			return false // gives back what others took as well
		case at.Func.Release():
			if taken[l]--; taken[l] < 0 {
				return false
			}
		default:
			taken[l]++
		}
	}
	for _, n := range taken {
		if n != 0 {
			return false
		}
	}
	return true
}

// discipline is the levels in force. It may be changed while connections use
// it: readers see the old levels or the new ones, never a mixture.
type discipline struct {
	mu  sync.Mutex // serialises writers
	now atomic.Pointer[levels]
}

type levels struct {
	preset Preset
	rules  map[Rule]Level // set one by one, over the preset
	all    map[Rule]Level // what follows from both, for every rule
}

func (d *discipline) set(change func(*levels)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	next := levels{rules: map[Rule]Level{}}
	if now := d.now.Load(); now != nil {
		next.preset = now.preset
		maps.Copy(next.rules, now.rules)
	}
	change(&next)
	next.all = make(map[Rule]Level, len(ruleTable))
	for _, row := range ruleTable {
		next.all[row.rule] = next.of(row)
	}
	d.now.Store(&next)
}

// observing reports whether nothing may be refused and nothing released.
func (d *discipline) observing() bool { return d.now.Load().preset == PresetObserve }

// level returns how strict the rule is now.
func (d *discipline) level(r Rule) Level { return d.now.Load().all[r] }

func (l *levels) of(row ruleRow) Level {
	level, set := l.rules[row.rule]
	switch {
	case set:
	case l.preset == PresetStrict:
		level = row.strict
	default:
		level = row.enforce
	}
	if l.preset == PresetObserve {
		level = min(level, LevelWarn)
	}
	return level
}

// SetPreset changes the preset of all connections, at once: for an incident.
// Levels that were set for single rules stay.
func (c *Connector) SetPreset(p Preset) {
	c.discipline.set(func(l *levels) { l.preset = p })
}

// SetRule changes the level of one rule for all connections, at once. It
// panics when there is no such rule.
func (c *Connector) SetRule(r Rule, level Level) {
	if !r.known() {
		panic(fmt.Sprintf("pgadvlock: SetRule: no rule %q; rules are %s", string(r), strings.Join(ruleNames(), ", ")))
	}
	c.discipline.set(func(l *levels) { l.rules[r] = level })
}

type allowKey struct{}

// Allow exempts the calls made with the returned context from the rules, as a
// linter's ignore comment does: for a lock that is right although it looks
// wrong. What is allowed is neither refused nor reported; a lock that leaks is
// still released.
func Allow(ctx context.Context, rules ...Rule) context.Context {
	before, _ := ctx.Value(allowKey{}).([]Rule)
	return context.WithValue(ctx, allowKey{}, slices.Concat(before, rules))
}

func allowed(ctx context.Context, r Rule) bool {
	rules, _ := ctx.Value(allowKey{}).([]Rule)
	return slices.Contains(rules, r)
}

// object delivers a finding, and returns the *RuleError for the caller when
// the rule is at LevelError.
func (c *Conn) object(ctx context.Context, r Rule, locks []Lock, caller Caller, err error) error {
	return c.objectOn(ctx, nil, r, locks, caller, err)
}

// objectOn is object for a finding that the spans of locks are to tell of too.
func (c *Conn) objectOn(ctx context.Context, holds []hold, r Rule, locks []Lock, caller Caller, err error) error {
	level := c.connector.discipline.level(r)
	if level == LevelOff || allowed(ctx, r) {
		return nil
	}
	e := c.event(r, level, locks)
	e.Err = err
	if caller != (Caller{}) {
		e.Caller = caller
	}
	c.connector.deliver(ctx, e, holds)
	if level == LevelError {
		return &RuleError{Event: e, Fix: r.fix()}
	}
	return nil
}
