package pgadvlock

// This file owns the discipline: which rules there are, how strict each is,
// and what it says. It sends nothing; the evidence is brought to it.

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

// Rule names a rule. It is an error, so that a program can ask
// errors.Is(err, [RuleUnlockNotHeld]), as with syscall.Errno.
type Rule string

const (
	// RuleLeakedSessionLock: a connection came back into the pool while it
	// held a session lock. The lock is released as well (see [WithReset]).
	// At LevelError it acts as at LevelWarn: there is nobody to refuse.
	RuleLeakedSessionLock Rule = "leaked-session-lock"
	// RuleUnlockNotHeld: pg_advisory_unlock answered false, because of a wrong
	// key, mode or key space, or because another connection holds the lock.
	// At LevelError the statement returns a *RuleError after the fact.
	RuleUnlockNotHeld Rule = "unlock-not-held"
	// RuleReturnHookHidden: a middleware between database/sql and pgadvlock
	// does not forward driver.Validator, so that locks are released only when
	// the connection is handed out again. At LevelError it acts as at LevelWarn.
	RuleReturnHookHidden Rule = "return-hook-hidden"
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
	// PresetStrict refuses what PresetEnforce reports. For tests.
	PresetStrict
)

// String returns "enforce", "observe" or "strict".
func (p Preset) String() string {
	return [...]string{"enforce", "observe", "strict"}[min(p, PresetStrict)]
}

// ruleTable is the one list of rules.
var ruleTable = []struct {
	rule            Rule
	enforce, strict Level
	fix             string
}{
	{RuleLeakedSessionLock, LevelWarn, LevelWarn,
		"unlock it on the same *sql.Conn before Close, or use pg_advisory_xact_lock, which ends with the transaction"},
	{RuleUnlockNotHeld, LevelWarn, LevelError,
		"lock and unlock on one *sql.Conn, with the same key, key space and mode"},
	{RuleReturnHookHidden, LevelWarn, LevelWarn,
		"put pgadvlock outside the other driver wrapper, or use a wrapper that forwards driver.Validator"},
}

func (r Rule) fix() string {
	for _, row := range ruleTable {
		if row.rule == r {
			return row.fix
		}
	}
	return ""
}

func (r Rule) known() bool { return slices.Contains(ruleNames(), string(r)) }

func ruleNames() []string {
	names := make([]string, len(ruleTable))
	for i, row := range ruleTable {
		names[i] = string(row.rule)
	}
	return names
}

// sentence says what was found, in one clause without the caller.
func (e Event) sentence() string {
	locks := describeLocks(e.Locks, e.Time)
	switch e.Rule {
	case RuleLeakedSessionLock:
		return locks + " was still held when the connection went back into the pool"
	case RuleUnlockNotHeld:
		s := e.Locks[0].describe(e.Time) + " was to be unlocked, but this session does not hold it"
		if len(e.Locks) > 1 {
			s += "; it holds " + describeLocks(e.Locks[1:], e.Time)
		}
		return s
	case RuleReturnHookHidden:
		s := "the connection was handed out again without having been cleaned at its return"
		if locks != "" {
			s += "; until now it held " + locks
		}
		return s
	}
	return strings.TrimSpace(string(e.Rule) + " " + locks)
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
	d.now.Store(&next)
}

// observing reports whether nothing may be refused and nothing released.
func (d *discipline) observing() bool { return d.now.Load().preset == PresetObserve }

// level returns how strict the rule is now.
func (d *discipline) level(r Rule) Level {
	now := d.now.Load()
	level, set := now.rules[r]
	if !set {
		for _, row := range ruleTable {
			if row.rule != r {
				continue
			}
			level = row.enforce
			if now.preset == PresetStrict {
				level = row.strict
			}
		}
	}
	if now.preset == PresetObserve {
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
