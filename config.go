package pgadvlock

// This file owns the settings: one table, three spellings each. It is the only
// place where a setting's name and values are written down.

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"
)

// Option sets one setting. A setting that is given more than once is resolved
// per setting, weakest first: options, environment (PGADVLOCK_X), DSN
// (pgadvlock_x).
type Option func(*settings)

// Reset is what happens to a connection that comes back holding session locks.
// The zero value is ResetUnlockAll.
type Reset uint8

const (
	ResetUnlockAll Reset = iota // pg_advisory_unlock_all(), and the connection stays in the pool
	// ResetDiscardAll sends DISCARD ALL, which also drops temporary tables,
	// LISTENs, session settings and prepared statements, and the connection
	// stays in the pool. Statements cached by pgx or prepared through
	// database/sql keep working, and the hook of [WithAfterConnect] is run
	// again. It costs a round trip more than ResetUnlockAll, and those of the
	// hook. It needs pgx underneath.
	ResetDiscardAll
	ResetClose // the connection is closed
	ResetOff   // reported only: the locks stay with the idle connection, as on plain pgx
)

// ResetWhen is which connections are reset when they come back. The zero value
// is ResetDirty.
type ResetWhen uint8

const (
	ResetDirty  ResetWhen = iota // those that the driver saw lock something, or that were lent out raw
	ResetAlways                  // every one, for locks taken inside server-side functions: one round trip a return
)

// PoolMode is what stands between a connection and its backend. The zero
// value is PoolAuto, which is only a setting: find out.
type PoolMode uint8

const (
	PoolAuto        PoolMode = iota // as a setting: find out. Of a connection: not asked yet
	PoolDirect                      // nothing: the connection has its backend for itself
	PoolSession                     // a pooler in session mode: the backend stays until the connection is closed
	PoolTransaction                 // a pooler in transaction mode: another backend for every transaction
	PoolStatement                   // a pooler in statement mode: another backend for every statement
	PoolUnknown                     // it could not be found out
)

var poolModes = [...]string{"auto", "direct", "session", "transaction", "statement", "unknown"}

// String returns the mode's name, "direct" for PoolDirect.
func (m PoolMode) String() string { return poolModes[min(m, PoolUnknown)] }

// settings is what options, environment and DSN add up to.
type settings struct {
	preset       Preset
	rules        map[Rule]Level
	reset        Reset
	resetWhen    ResetWhen
	resetTimeout time.Duration
	functions    []string
	poolMode     PoolMode
	keyArguments bool
	maxWait      time.Duration
	blockerAfter time.Duration
	waitWarning  time.Duration
	poolName     string
	queryText    bool
	deadPeer     time.Duration

	afterConnect   func(context.Context, *pgx.Conn) error
	handler        func(context.Context, Event)
	logger         *slog.Logger
	tracerProvider trace.TracerProvider
	meterProvider  metric.MeterProvider
}

// WithPreset sets all rules at once. Default PresetEnforce.
func WithPreset(p Preset) Option { return func(s *settings) { s.preset = p } }

// WithRule sets the level of one rule, over the preset.
func WithRule(r Rule, l Level) Option { return func(s *settings) { s.rules[r] = l } }

// WithReset sets what happens to a connection that comes back holding session
// locks. Default ResetUnlockAll.
func WithReset(r Reset) Option { return func(s *settings) { s.reset = r } }

// WithResetWhen sets which connections are reset. Default ResetDirty.
func WithResetWhen(w ResetWhen) Option { return func(s *settings) { s.resetWhen = w } }

// WithResetTimeout bounds the reset of one connection. Default 2 seconds; it
// must be positive.
func WithResetTimeout(d time.Duration) Option { return func(s *settings) { s.resetTimeout = d } }

// WithFunctions names server-side functions and procedures that take session
// locks, so that statements calling them count as lock statements. Default
// none. Names are written as in SQL: bare or schema-qualified, folded to lower
// case unless quoted.
func WithFunctions(names ...string) Option { return func(s *settings) { s.functions = names } }

// WithPoolMode tells what stands between the program and PostgreSQL instead
// of finding it out. Default PoolAuto. PoolSession is for proxies that pin a
// connection which holds a session lock.
func WithPoolMode(m PoolMode) Option { return func(s *settings) { s.poolMode = m } }

// WithMaxWait bounds how long a plain statement waits for advisory locks, by the
// server's lock_timeout, for that statement only: a tighter lock_timeout of the
// program's own stays, and the old value is back afterwards. The error is
// PostgreSQL's 55P03, wrapped. Default 0, no bound; otherwise at least a
// millisecond. It costs two round trips a waiting lock.
func WithMaxWait(d time.Duration) Option { return func(s *settings) { s.maxWait = d } }

// WithBlockerAfter sets how long a plain statement waits for a lock before the
// driver asks, on a connection of its own, who holds it, and puts the answer on
// the statement's span. Default 1 second; 0 never asks.
func WithBlockerAfter(d time.Duration) Option { return func(s *settings) { s.blockerAfter = d } }

// WithWaitWarning sets after how long a wait is reported ([RuleLongWait]).
// Default 30 seconds; 0 is never.
func WithWaitWarning(d time.Duration) Option { return func(s *settings) { s.waitWarning = d } }

// WithDeadPeer sets within about what time the server notices that the host of a
// connection with session locks has vanished, and frees them. Default 1 minute;
// 0 leaves the server's settings alone; otherwise from 2 seconds to an hour. It sets
// tcp_keepalives_idle, _interval and _count, tcp_user_timeout and
// client_connection_check_interval for the session, unless they are tighter,
// with the question that the first session lock asks; not when that is asked
// in a transaction, nor behind a pooler.
func WithDeadPeer(d time.Duration) Option { return func(s *settings) { s.deadPeer = d } }

// WithPoolName sets the name of the pool in metrics, db.client.connection.pool.name.
// Default "", which is server.address:server.port/db.namespace. Where Connectors
// of one process have the same name, the second is name#2. Blanks, quotes and
// the characters =;&?@ are not allowed.
func WithPoolName(name string) Option { return func(s *settings) { s.poolName = name } }

// WithQueryText puts the text of lock statements on their spans. Default off:
// it may hold what nobody should read.
func WithQueryText(on bool) Option { return func(s *settings) { s.queryText = on } }

// WithKeyArguments shows the argument values of a key that is an expression,
// hashtext('refunds') instead of hashtext($1), in events, logs and spans. Default
// off: an argument may be a person's name.
func WithKeyArguments(on bool) Option { return func(s *settings) { s.keyArguments = on } }

// WithAfterConnect sets a hook that prepares a connection: it is run after
// connecting, and again after each DISCARD ALL (see [ResetDiscardAll]), which
// undoes what it SET. An error of it at connecting is that of the connect; at
// a return to the pool the connection is closed. It needs pgx underneath.
// Session locks that it takes are released like any others.
func WithAfterConnect(f func(context.Context, *pgx.Conn) error) Option {
	return func(s *settings) { s.afterConnect = f }
}

// WithEventHandler sets the function that gets every [Event]. It is called
// synchronously, perhaps inside database/sql's own locks and from several
// goroutines at once: it must not use the *sql.DB and must not block. To do
// more, send to a buffered channel. A panic in it is recovered, logged and counted
// (pgadvlock.handler_panics). The context is the caller's; at the return to the
// pool, where there is none, its span is that of the first lock's hold.
func WithEventHandler(f func(context.Context, Event)) Option {
	return func(s *settings) { s.handler = f }
}

// WithLogger sets the logger for events. Default slog.Default(), asked at each
// event.
func WithLogger(l *slog.Logger) Option { return func(s *settings) { s.logger = l } }

// WithTracerProvider sets where spans go. Default otel.GetTracerProvider().
func WithTracerProvider(p trace.TracerProvider) Option {
	return func(s *settings) { s.tracerProvider = p }
}

// WithMeterProvider sets where measurements go. Default
// otel.GetMeterProvider().
func WithMeterProvider(p metric.MeterProvider) Option {
	return func(s *settings) { s.meterProvider = p }
}

// setting is a row of the table: the DSN parameter is pgadvlock_name, the
// environment variable PGADVLOCK_NAME.
type setting struct {
	name  string
	valid string // the values it takes, for error messages
	parse func(*settings, string) error
}

var settingTable = []setting{
	{"preset", "enforce, observe, strict", func(s *settings, v string) error {
		return choose(&s.preset, v, "enforce", "observe", "strict")
	}},
	{"rules", "name:level,... with the levels off, warn, error and the names " + strings.Join(ruleNames(), ", "), parseRules},
	{"reset", "unlock_all, discard_all, close, off", func(s *settings, v string) error {
		return choose(&s.reset, v, "unlock_all", "discard_all", "close", "off")
	}},
	{"reset_when", "dirty, always", func(s *settings, v string) error {
		return choose(&s.resetWhen, v, "dirty", "always")
	}},
	{"reset_timeout", "a positive duration such as 2s or 500ms", func(s *settings, v string) (err error) {
		s.resetTimeout, err = time.ParseDuration(v)
		if err == nil && s.resetTimeout <= 0 {
			err = errInvalid
		}
		return err
	}},
	{"functions", "function names separated by commas", func(s *settings, v string) error {
		s.functions = nil
		for name := range strings.SplitSeq(v, ",") {
			s.functions = append(s.functions, strings.TrimSpace(name))
		}
		return nil
	}},
	{"pool_mode", strings.Join(poolModes[:], ", "), func(s *settings, v string) error {
		return choose(&s.poolMode, v, poolModes[:]...)
	}},
	{"max_wait", "0, or a duration of at least 1ms such as 30s", func(s *settings, v string) (err error) {
		s.maxWait, err = time.ParseDuration(v)
		if err == nil && !validWait(s.maxWait) {
			err = errInvalid
		}
		return err
	}},
	{"blocker_after", "0, or a duration such as 1s", func(s *settings, v string) error { return chooseDuration(&s.blockerAfter, v) }},
	{"wait_warning", "0, or a duration such as 30s", func(s *settings, v string) error { return chooseDuration(&s.waitWarning, v) }},
	{"dead_peer", "0, or a duration from 2s to 1h such as 60s", func(s *settings, v string) error {
		if err := chooseDuration(&s.deadPeer, v); err != nil || !validPeer(s.deadPeer) {
			return errInvalid
		}
		return nil
	}},
	{"pool_name", "a name without blanks, quotes and =;&?@", func(s *settings, v string) error {
		if v == "" || strings.ContainsAny(v, separators) {
			return errInvalid
		}
		s.poolName = v
		return nil
	}},
	{"query_text", "off, on", func(s *settings, v string) error { return chooseBool(&s.queryText, v) }},
	{"key_arguments", "off, on", func(s *settings, v string) error {
		return chooseBool(&s.keyArguments, v)
	}},
}

var errInvalid = errors.New("invalid value")

// choose sets an enumeration whose constants count up from zero in the order
// of the values.
func choose[T ~uint8](dest *T, v string, values ...string) error {
	i := slices.Index(values, v)
	if i < 0 {
		return errInvalid
	}
	*dest = T(i)
	return nil
}

// chooseDuration sets a duration that may be 0.
func chooseDuration(dest *time.Duration, v string) (err error) {
	*dest, err = time.ParseDuration(v)
	if err == nil && *dest < 0 {
		err = errInvalid
	}
	return err
}

// validPeer reports whether the server can be told so: keepalives are seconds.
func validPeer(d time.Duration) bool { return d == 0 || d >= 2*time.Second && d <= time.Hour }

// validWait reports whether the server can be told to wait so long: its
// timeouts are milliseconds in an int4.
func validWait(d time.Duration) bool {
	return d == 0 || d >= time.Millisecond && d.Milliseconds() <= 1<<31-1
}

func chooseBool(dest *bool, v string) error {
	if v != "on" && v != "off" {
		return errInvalid
	}
	*dest = v == "on"
	return nil
}

func parseRules(s *settings, v string) error {
	for part := range strings.SplitSeq(v, ",") {
		name, level, _ := strings.Cut(strings.TrimSpace(part), ":")
		var l Level
		if !Rule(name).known() || choose(&l, level, "off", "warn", "error") != nil {
			return fmt.Errorf("%q is not a rule and a level", shown(strings.TrimSpace(part)))
		}
		s.rules[Rule(name)] = l
	}
	return nil
}

// param is one of our parameters, taken out of a DSN.
type param struct{ name, value string }

// fromOptions applies options alone.
func fromOptions(opts []Option) (*settings, error) {
	s := &settings{rules: map[Rule]Level{}, resetTimeout: 2 * time.Second, blockerAfter: time.Second, waitWarning: 30 * time.Second, deadPeer: time.Minute}
	for _, o := range opts {
		if o != nil {
			o(s)
		}
	}
	return s, s.check()
}

// resolve adds up the options, the environment and the parameters of a DSN.
func resolve(opts []Option, params []param) (*settings, error) {
	s, err := fromOptions(opts)
	if err != nil {
		return nil, err
	}
	var env []param
	for _, row := range settingTable {
		if v := os.Getenv("PGADVLOCK_" + strings.ToUpper(row.name)); v != "" {
			env = append(env, param{row.name, v})
		}
	}
	if err := s.apply(env, func(name string) string { return "environment variable PGADVLOCK_" + strings.ToUpper(name) }); err != nil {
		return nil, err
	}
	if err := s.apply(params, func(name string) string { return "DSN parameter pgadvlock_" + name }); err != nil {
		return nil, err
	}
	return s, nil
}

// check refuses what only an option can get wrong: a constant that is none.
func (s *settings) check() error {
	bad := func(option string, v any) error { return fmt.Errorf("pgadvlock: %s: invalid value %v", option, v) }
	switch {
	case s.preset > PresetStrict:
		return bad("WithPreset", uint8(s.preset))
	case s.reset > ResetOff:
		return bad("WithReset", uint8(s.reset))
	case s.resetWhen > ResetAlways:
		return bad("WithResetWhen", uint8(s.resetWhen))
	case s.resetTimeout <= 0:
		return bad("WithResetTimeout", s.resetTimeout)
	case !validWait(s.maxWait):
		return bad("WithMaxWait", s.maxWait)
	case !validPeer(s.deadPeer):
		return bad("WithDeadPeer", s.deadPeer)
	case s.blockerAfter < 0:
		return bad("WithBlockerAfter", s.blockerAfter)
	case s.waitWarning < 0:
		return bad("WithWaitWarning", s.waitWarning)
	case strings.ContainsAny(s.poolName, separators):
		return bad("WithPoolName", strconv.Quote(shown(s.poolName)))
	case s.poolMode > PoolUnknown:
		return bad("WithPoolMode", uint8(s.poolMode))
	}
	for r, l := range s.rules {
		if !r.known() || l > LevelError {
			return fmt.Errorf("pgadvlock: WithRule: no rule %q at level %d; rules are %s", string(r), l, strings.Join(ruleNames(), ", "))
		}
	}
	return s.checkFunctions("WithFunctions")
}

func (s *settings) checkFunctions(where string) error {
	for _, f := range s.functions {
		if strings.Trim(f, `". `) == "" {
			return fmt.Errorf("pgadvlock: %s: %q is no function name", where, f)
		}
	}
	return nil
}

// apply sets one source's values over what weaker sources said. A preset
// discards the levels that a weaker source set for single rules.
func (s *settings) apply(params []param, spell func(name string) string) error {
	if slices.ContainsFunc(params, func(p param) bool { return p.name == "preset" }) {
		clear(s.rules)
	}
	for i, p := range params {
		row := slices.IndexFunc(settingTable, func(row setting) bool { return row.name == p.name })
		if row < 0 {
			return fmt.Errorf("pgadvlock: unknown %s; there are %s", spell(p.name), settingNames())
		}
		if slices.ContainsFunc(params[:i], func(q param) bool { return q.name == p.name }) {
			return fmt.Errorf("pgadvlock: %s is given twice", spell(p.name))
		}
		err := settingTable[row].parse(s, p.value)
		if err == nil && p.name == "functions" {
			err = s.checkFunctions(spell(p.name))
		}
		if err == nil {
			continue
		}
		detail := ""
		if err != errInvalid {
			detail = " (" + err.Error() + ")"
		}
		return fmt.Errorf("pgadvlock: %s: invalid value %q%s; valid: %s", spell(p.name), shown(p.value), detail, settingTable[row].valid)
	}
	return nil
}

// separators are what may begin another parameter in one kind of DSN or another.
const separators = "=;&?@' \t\r\n"

// shown is a value as an error names it: up to where another parameter seems
// to begin, which a wrong separator made part of the value and which may be a
// password.
func shown(value string) string {
	if i := strings.IndexAny(value, separators); i >= 0 {
		return value[:i] + "…"
	}
	return value
}

func settingNames() string {
	names := make([]string, len(settingTable))
	for i, row := range settingTable {
		names[i] = "pgadvlock_" + row.name
	}
	return strings.Join(names, ", ")
}

// ourParam returns the setting that a DSN parameter of this name belongs to.
// pgx and libpq know no parameter that begins so, and PgBouncer refuses
// startup parameters that it does not know, so none of ours may get through.
func ourParam(key string) (name string, ours bool) {
	const prefix = "pgadvlock_"
	if len(key) < len(prefix) || !strings.EqualFold(key[:len(prefix)], prefix) {
		return "", false
	}
	return key[len(prefix):], true
}

// splitDSN takes our parameters out of a DSN, in URL or keyword form, and
// leaves the rest as it is, byte for byte. A DSN that it cannot read goes
// through unchanged, for pgx to say what is wrong with it.
func splitDSN(dsn string) (rest string, params []param, err error) {
	if strings.HasPrefix(dsn, "postgres://") || strings.HasPrefix(dsn, "postgresql://") {
		return splitURL(dsn)
	}
	return splitKeywords(dsn)
}

// splitURL reads a URI as pgx and libpq do (conninfo_uri_parse): there is no
// fragment, and a plus sign is a plus sign.
func splitURL(dsn string) (rest string, params []param, err error) {
	start := queryStart(dsn)
	if start < 0 {
		return dsn, nil, nil
	}
	var kept []string
	for pair := range strings.SplitSeq(dsn[start+1:], "&") {
		k, v, _ := strings.Cut(pair, "=")
		key, kerr := url.PathUnescape(k)
		name, ours := ourParam(strings.Trim(key, " "))
		if kerr != nil || !ours {
			kept = append(kept, pair)
			continue
		}
		value, verr := url.PathUnescape(v)
		if verr != nil {
			return "", nil, fmt.Errorf("pgadvlock: DSN parameter pgadvlock_%s: %w", name, verr)
		}
		params = append(params, param{name, strings.Trim(value, " ")})
	}
	if len(params) == 0 {
		return dsn, nil, nil
	}
	rest = dsn[:start]
	if len(kept) > 0 {
		rest += "?" + strings.Join(kept, "&")
	}
	return rest, params, nil
}

// queryStart returns the index of the question mark that begins the query, or
// -1: one in a password or between the brackets of an IPv6 address does not.
func queryStart(dsn string) int {
	i := strings.Index(dsn, "://") + len("://")
	if end := strings.IndexAny(dsn[i:], "@/"); end >= 0 && dsn[i+end] == '@' {
		i += end + 1
	}
	for ; i < len(dsn); i++ {
		switch dsn[i] {
		case '?':
			return i
		case '/':
			if q := strings.IndexByte(dsn[i:], '?'); q >= 0 {
				return i + q
			}
			return -1
		case '[':
			if end := strings.IndexByte(dsn[i:], ']'); end >= 0 {
				i += end
			}
		}
	}
	return -1
}

// splitKeywords reads "key=value key = 'va lue'" as pgx and libpq do (libpq's
// conninfo_parse): blanks around the equals sign, backslash escapes.
func splitKeywords(dsn string) (rest string, params []param, err error) {
	var b strings.Builder
	for i := 0; i < len(dsn); {
		start := i
		eq := strings.IndexByte(dsn[i:], '=')
		if eq < 0 {
			return b.String() + dsn[start:], params, nil
		}
		key := strings.Trim(dsn[i:i+eq], " \t\n\r\v\f")
		i += eq + 1
		for i < len(dsn) && isBlank(dsn[i]) {
			i++
		}
		value, end, closed := keywordValue(dsn, i)
		name, ours := ourParam(key)
		switch {
		case ours && !closed:
			// The value may have swallowed the rest of the DSN, with a
			// password in it: it must not be named.
			return "", nil, fmt.Errorf("pgadvlock: DSN parameter pgadvlock_%s: unterminated quoted string", name)
		case ours:
			params = append(params, param{name, value})
		default:
			b.WriteString(dsn[start:end])
		}
		i = end
	}
	if len(params) == 0 {
		return dsn, nil, nil
	}
	return strings.TrimLeft(b.String(), " \t\n\r\v\f"), params, nil
}

// keywordValue reads the value that begins at i; end is behind it.
func keywordValue(dsn string, i int) (value string, end int, closed bool) {
	var b strings.Builder
	quoted := i < len(dsn) && dsn[i] == '\''
	if quoted {
		i++
	}
	for ; i < len(dsn); i++ {
		switch c := dsn[i]; {
		case c == '\\' && i+1 < len(dsn):
			i++
			b.WriteByte(dsn[i])
		case quoted && c == '\'':
			return b.String(), i + 1, true
		case !quoted && isBlank(c):
			return b.String(), i, true
		default:
			b.WriteByte(c)
		}
	}
	return b.String(), i, !quoted
}

func isBlank(c byte) bool { return strings.IndexByte(" \t\n\r\v\f", c) >= 0 }
