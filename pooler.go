package pgadvlock

// This file owns the question what stands between a connection and its
// backend: when it is asked, how long an answer holds, and what is refused for
// it. How it is found out is in internal/poolmode.

import (
	"context"
	"crypto/tls"
	"database/sql/driver"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgadvlock/pgadvlock/internal/ledger"
	"github.com/pgadvlock/pgadvlock/internal/poolmode"
)

// queryCanceled is the SQLSTATE of a cancel and of statement_timeout.
const queryCanceled = "57014"

// verdictHolds is how long a verdict on a road is shared between connections.
// It is also how often a road that could not be judged is looked at again.
const verdictHolds = time.Minute

// roadKey is what connections must have in common to have a road in common: a
// pooler pools by these.
type roadKey struct{ address, database, user string }

// roads are what is known of the ways to the server. A probe costs connections,
// so one is under way at a time for each road, and the others wait for it.
type roads struct {
	mu    sync.Mutex // guards known
	known map[roadKey]*road
}

type road struct {
	turn    chan struct{} // holds one token, which guards the rest
	verdict poolmode.Verdict
	judged  time.Time
	told    poolmode.Mode // what the log was told last
}

func (r *roads) of(k roadKey) *road {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.known == nil {
		r.known = map[roadKey]*road{}
	}
	if r.known[k] == nil {
		r.known[k] = &road{turn: make(chan struct{}, 1)}
	}
	return r.known[k]
}

var modes = map[poolmode.Mode]PoolMode{
	poolmode.Unknown:     PoolUnknown,
	poolmode.Direct:      PoolDirect,
	poolmode.Session:     PoolSession,
	poolmode.Transaction: PoolTransaction,
	poolmode.Statement:   PoolStatement,
}

// poolMode returns what is known of the connection's road: PoolAuto as long as
// nobody asked.
func (c *Conn) poolMode() PoolMode { return PoolMode(c.mode.Load()) }

// PoolMode finds out what stands between the connection and its backend, if it
// is not known yet, and says from what it was concluded. The error is the
// connection's own, if it broke or ctx ended in the meantime; that the mode
// could not be found out is no error but [PoolUnknown].
func (c *Conn) PoolMode(ctx context.Context) (mode PoolMode, evidence string, err error) {
	if err := c.askPoolMode(ctx); err != nil {
		return PoolUnknown, "", err
	}
	if mode = c.poolMode(); mode == PoolAuto {
		return PoolUnknown, "the connection is busy, closed, or in a failed transaction", nil
	}
	return mode, c.evidence, nil
}

// askPoolMode finds out what stands between the connection and its backend,
// before the first statement that takes a session lock, or before a release.
// On the connection itself that costs one round trip, which disturbs no
// transaction; everything else happens on connections of the probe's own.
//
// It fails only when that round trip broke the connection: then the caller
// must hear what pgx would have said to the statement that was to follow.
func (c *Conn) askPoolMode(ctx context.Context) error {
	switch c.poolMode() {
	case PoolAuto:
	case PoolUnknown:
		if c.asked.IsZero() || time.Since(c.asked) < verdictHolds {
			return nil
		}
	default:
		return nil
	}
	if c.pgx == nil {
		c.conclude(PoolUnknown, "the driver underneath does not show the server's greeting")
		return nil
	}
	pg := c.pgx.PgConn()
	if pg.IsClosed() || pg.IsBusy() || pg.TxStatus() == 'E' {
		return nil
	}
	if isRDSProxy(c.pgx.Config().Host) {
		c.conclude(PoolSession, "RDS Proxy pins a connection that holds a session lock")
		return nil
	}
	also := c.deadPeerSettings()
	first, err := poolmode.Ask(ctx, pg, also...)
	if state := sqlState(err); state != "" && state != queryCanceled && len(also) > 0 && !pg.IsClosed() {
		c.connector.peerRefused.Store(true) // the server does not take them
		first, err = poolmode.Ask(ctx, pg)
	}
	switch {
	case err != nil && (ctx.Err() != nil || sqlState(err) == queryCanceled) && !pg.IsClosed():
		return nil // nothing was learned: the statement that follows meets the same, or asks again
	case pgconn.SafeToRetry(err):
		return driver.ErrBadConn // as pgx's stdlib does
	case err != nil && !pg.IsClosed():
		c.conclude(PoolUnknown, "the backend did not say who it is")
		return nil
	case err != nil:
		return errors.Unwrap(err)
	}
	c.backendPID.Store(first.BackendPID)
	if first.Direct {
		c.conclude(PoolDirect, "the backend is the process that greeted the connection, and has its port")
		return nil
	}
	c.examine(ctx, first)
	return nil
}

// deadPeerSettings are expressions that make the server notice within about
// pgadvlock_dead_peer that the program's host has vanished, and free its locks,
// where TCP's defaults take two hours. They ride on the first question, outside
// a transaction, whose end might undo them, and take effect only where the
// server's own answer shows that nobody stands in between: the backend of a
// pooler is not ours to configure. Settings that are tighter already stay.
func (c *Conn) deadPeerSettings() []string {
	limit := c.connector.settings.deadPeer
	pg := c.pgx.PgConn()
	if limit == 0 || c.connector.peerRefused.Load() || pg.TxStatus() != 'I' {
		return nil
	}
	port := "IS NULL"
	if tcp, ok := pg.Conn().LocalAddr().(*net.TCPAddr); ok {
		port = fmt.Sprintf("OPERATOR(pg_catalog.=) %d", tcp.Port)
	}
	seconds := max(int(limit/time.Second), 2)
	const ms = "pg_catalog.date_part('epoch', pg_catalog.current_setting('%s', true)::pg_catalog.interval) OPERATOR(pg_catalog.*) 1000::pg_catalog.float8"
	const number = "pg_catalog.current_setting('%s', true)::pg_catalog.float8"
	settings := []struct {
		name, now string // now is what PostgreSQL shows, with or without a unit, in that of value
		value     int
	}{
		{"tcp_keepalives_idle", number, seconds / 2},
		{"tcp_keepalives_interval", number, max(seconds/6, 1)},
		{"tcp_keepalives_count", number, 3},
		{"tcp_user_timeout", number, seconds * 1000},
		{"client_connection_check_interval", ms, seconds * 1000 / 4}, // PostgreSQL 14
	}
	var also []string
	for _, s := range settings {
		also = append(also, fmt.Sprintf("CASE WHEN pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) %d AND pg_catalog.inet_client_port() %s"+
			" AND pg_catalog.current_setting('%[3]s', true) IS NOT NULL"+
			" AND NOT (%[4]s OPERATOR(pg_catalog.>=) 1::pg_catalog.float8 AND %[4]s OPERATOR(pg_catalog.<=) %[5]d::pg_catalog.float8)"+
			" THEN pg_catalog.set_config('%[3]s', '%[5]d', false) END", int32(pg.PID()), port, s.name, fmt.Sprintf(s.now, s.name), s.value))
	}
	return also
}

func (c *Conn) conclude(mode PoolMode, evidence string) {
	c.mode.Store(uint32(mode))
	c.evidence, c.asked = evidence, time.Now()
}

// isRDSProxy knows the host names of RDS Proxy endpoints.
func isRDSProxy(host string) bool {
	host = strings.TrimSuffix(strings.ToLower(host), ".cn")
	ok, _ := path.Match("*.proxy-*.rds.amazonaws.com", host) // the pattern is well-formed
	return ok
}

// examine has the road probed, or takes the verdict that holds for it.
func (c *Conn) examine(ctx context.Context, first poolmode.First) {
	cfg := c.pgx.Config()
	key := roadKey{c.pgx.PgConn().Conn().RemoteAddr().String(), cfg.Database, cfg.User}
	r := c.connector.roads.of(key)
	select {
	case r.turn <- struct{}{}:
	case <-ctx.Done():
		return // not asked: the statement that follows will report the context
	}
	defer func() { <-r.turn }()
	if r.judged.IsZero() || time.Since(r.judged) >= verdictHolds {
		verdict := poolmode.Probe(ctx, first, c.dialAgain)
		if ctx.Err() != nil && verdict.Mode == poolmode.Unknown {
			return // the verdict is on the context, not on the road
		}
		r.verdict, r.judged = verdict, time.Now()
		if r.told != verdict.Mode || verdict.Mode == poolmode.Unknown {
			r.told = verdict.Mode
			c.connector.logger().LogAttrs(ctx, slog.LevelDebug, "pgadvlock: pool mode found out",
				slog.String("pool_mode", verdict.Mode.String()), slog.String("evidence", verdict.Evidence),
				slog.String("address", key.address), slog.String("database", key.database), slog.String("user", key.user))
		}
	}
	c.conclude(modes[r.verdict.Mode], r.verdict.Evidence)
}

// dialAgain makes another connection of the same kind to where this one leads,
// past the pool and without the caller's hooks. A config with several hosts
// names the first, not the one that answered, so that one is looked for.
func (c *Conn) dialAgain(ctx context.Context) (*pgconn.PgConn, error) {
	live := c.pgx.PgConn().Conn()
	cfg := c.pgx.Config().Config.Copy()
	candidates := append([]*pgconn.FallbackConfig{{Host: cfg.Host, Port: cfg.Port, TLSConfig: cfg.TLSConfig}}, cfg.Fallbacks...)
	cfg.Fallbacks = nil
	_, encrypted := live.(*tls.Conn)
	i := slices.IndexFunc(candidates, func(f *pgconn.FallbackConfig) bool {
		return (f.TLSConfig != nil) == encrypted && leadsTo(ctx, cfg.LookupFunc, f, live.RemoteAddr())
	})
	if i >= 0 {
		cfg.Host, cfg.Port, cfg.TLSConfig = candidates[i].Host, candidates[i].Port, candidates[i].TLSConfig
	}
	if tcp, ok := live.RemoteAddr().(*net.TCPAddr); ok && i >= 0 {
		cfg.Host = tcp.IP.String() // a name may have several addresses
	}
	cfg.AfterConnect, cfg.ValidateConnect, cfg.OnNotice, cfg.OnNotification = nil, nil, nil, nil
	cfg.OnPgError = nil
	return pgconn.ConnectConfig(ctx, cfg)
}

// leadsTo reports whether a host of a config is where the address is.
func leadsTo(ctx context.Context, lookup pgconn.LookupFunc, f *pgconn.FallbackConfig, remote net.Addr) bool {
	tcp, ok := remote.(*net.TCPAddr)
	if !ok {
		return strings.HasPrefix(f.Host, "/") || strings.HasPrefix(f.Host, "@") // a Unix socket
	}
	if int(f.Port) != tcp.Port {
		return false
	}
	if ip := net.ParseIP(f.Host); ip != nil {
		return ip.Equal(tcp.IP)
	}
	addresses, err := lookup(ctx, f.Host)
	return err == nil && slices.ContainsFunc(addresses, func(a string) bool {
		host, _, err := net.SplitHostPort(a) // a lookup may answer with ports
		if err != nil {
			host = a
		}
		return net.ParseIP(host).Equal(tcp.IP)
	})
}

// admitRoad judges a session-level statement by what stands between the
// connection and its backend, after finding that out.
func (c *Conn) admitRoad(ctx context.Context, attempts []ledger.Attempt[origin], from site) error {
	if err := c.admitPooler(ctx, attempts, from); err != nil {
		return err
	}
	if c.poolMode() != PoolUnknown || c.pgx == nil && c.connector.saidUnproven.Swap(true) {
		return nil
	}
	caller := c.caller(from)
	return c.object(ctx, RuleUnprovenPooling, attemptedLocks(attempts, caller), caller, c.road())
}

// admitPooler is admitRoad for a statement that is only being prepared.
func (c *Conn) admitPooler(ctx context.Context, attempts []ledger.Attempt[origin], from site) error {
	if err := c.askPoolMode(ctx); err != nil {
		return err
	}
	if mode := c.poolMode(); mode == PoolTransaction || mode == PoolStatement {
		caller := c.caller(from)
		return c.object(ctx, RuleTransactionPooling, attemptedLocks(attempts, caller), caller, c.road())
	}
	return nil
}

// road says what is known of the connection's road, as the reason of a report.
func (c *Conn) road() error {
	return fmt.Errorf("pool mode %s: %s", c.poolMode(), c.evidence)
}
