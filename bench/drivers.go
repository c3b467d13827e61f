package main

// This file owns the entrants: the drivers that are compared, all around the
// same connections.
//
// In races of one goroutine the entrants of a sitting share one physical
// connection: the same socket, the same backend process, the same cache of
// prepared statements. So what differs is the driver. Entrants that do something
// to the session which the others would feel have connections of their own.

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"log/slog"
	"sync"
	"time"

	xsam "github.com/XSAM/otelsql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/lib/pq"
	"github.com/ngrok/sqlmw"
	"github.com/pgadvlock/pgadvlock"
	uptrace "github.com/uptrace/opentelemetry-go-extra/otelsql"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// entrant is a driver in a race.
type entrant struct {
	name string
	open func(g *ground, base driver.Connector) *sql.DB
}

// plain is no driver on top: the floor.
func plain(name string) entrant {
	return entrant{name, func(_ *ground, base driver.Connector) *sql.DB { return sql.OpenDB(base) }}
}

func ours(name string, opts ...pgadvlock.Option) entrant {
	opts = append(opts, pgadvlock.WithLogger(slog.New(slog.DiscardHandler))) // dirty returns warn
	return entrant{name, func(_ *ground, base driver.Connector) *sql.DB {
		return sql.OpenDB(must1(pgadvlock.WrapConnector(base, opts...)))
	}}
}

func sqlmwNull() entrant {
	return entrant{"sqlmw", func(_ *ground, base driver.Connector) *sql.DB {
		return sql.OpenDB(driverConnector{sqlmw.Driver(connectorDriver{base}, sqlmw.NullInterceptor{})})
	}}
}

func xsamOtel(name string, opts ...xsam.Option) entrant {
	return entrant{name, func(_ *ground, base driver.Connector) *sql.DB { return xsam.OpenDB(base, opts...) }}
}

func uptraceOtel(name string, opts ...uptrace.Option) entrant {
	return entrant{name, func(_ *ground, base driver.Connector) *sql.DB { return uptrace.OpenDB(base, opts...) }}
}

// sampling returns a provider that samples every span and keeps them in memory.
// Without batches all work is done where the span ends, and can be measured. With
// them, as programs have it, a goroutine is woken up for most spans of a program
// that does nothing else; what that costs is the scheduler's affair, and the same
// for all.
func sampling(g *ground, batches bool) trace.TracerProvider {
	processor := sdk.WithSyncer(&memory{})
	if batches {
		processor = sdk.WithBatcher(&memory{}, sdk.WithBlocking()) // none dropped
	}
	provider := sdk.NewTracerProvider(processor)
	g.after(func() { must(provider.Shutdown(ctx)) })
	return provider
}

// memory is an exporter that keeps the last spans. The SDK's own, tracetest's, grows
// without end, and copying what it has takes longer than the spans.
type memory struct {
	mu    sync.Mutex // guards the rest
	spans [1024]sdk.ReadOnlySpan
	next  int
}

func (m *memory) ExportSpans(_ context.Context, spans []sdk.ReadOnlySpan) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range spans {
		m.spans[m.next%len(m.spans)] = s
		m.next++
	}
	return nil
}

func (m *memory) Shutdown(context.Context) error { return nil }

// sampled is an entrant that records every span.
func sampled(name string, batches bool, with func(string, trace.TracerProvider) entrant) entrant {
	return entrant{name, func(g *ground, base driver.Connector) *sql.DB {
		return with(name, sampling(g, batches)).open(g, base)
	}}
}

func oursSampled(opts ...pgadvlock.Option) entrant {
	return sampled("pgadvlock sampled", false, func(name string, p trace.TracerProvider) entrant {
		return ours(name, append(opts, pgadvlock.WithTracerProvider(p))...)
	})
}

func oursBatched() entrant {
	return sampled("pgadvlock batched", true, func(name string, p trace.TracerProvider) entrant {
		return ours(name, pgadvlock.WithTracerProvider(p))
	})
}

// middlewares are the peers of statements that have nothing to do with locks.
func middlewares() []entrant {
	return []entrant{
		sqlmwNull(),
		xsamOtel("XSAM"),
		sampled("XSAM sampled", false, func(name string, p trace.TracerProvider) entrant {
			return xsamOtel(name, xsam.WithTracerProvider(p))
		}),
		uptraceOtel("uptrace"),
		sampled("uptrace sampled", false, func(name string, p trace.TracerProvider) entrant {
			return uptraceOtel(name, uptrace.WithTracerProvider(p))
		}),
	}
}

// resetters are what people do today against locks that stay: reset every
// session that comes back. They have connections of their own to the DSN.
func resetters(dsn string, connections int32) []entrant {
	return []entrant{
		{"DISCARD ALL", func(g *ground, _ driver.Connector) *sql.DB {
			return sql.OpenDB(discarding{stdlib.GetConnector(*discardable(dsn))})
		}},
		{"pgxpool DISCARD ALL", func(g *ground, _ driver.Connector) *sql.DB {
			return openDiscardingPool(g, dsn, connections)
		}},
	}
}

// discardable is a configuration whose statements survive DISCARD ALL: pgx
// remembers what they look like, and nothing on the server.
func discardable(dsn string) *pgx.ConnConfig {
	cfg := must1(pgx.ParseConfig(dsn))
	cfg.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
	return cfg
}

// openDiscardingPool is a pgxpool whose AfterRelease hook resets, behind
// database/sql, so that it does the same work as all others.
func openDiscardingPool(g *ground, dsn string, size int32) *sql.DB {
	cfg := must1(pgxpool.ParseConfig(dsn))
	cfg.ConnConfig = discardable(dsn)
	cfg.MaxConns = size
	cfg.AfterRelease = func(c *pgx.Conn) bool { return discardAll(c) }
	pool := must1(pgxpool.NewWithConfig(ctx, cfg))
	g.after(pool.Close)
	return stdlib.OpenDBFromPool(pool)
}

func discardAll(c *pgx.Conn) bool {
	_, err := c.PgConn().Exec(ctx, "DISCARD ALL").ReadAll()
	return err == nil
}

// discarding is a driver that runs DISCARD ALL whenever a connection comes back.
type discarding struct{ driver.Connector }

func (d discarding) Connect(ctx context.Context) (driver.Conn, error) {
	c, err := d.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return discardingConn{c.(*pgxConn)}, nil
}

type discardingConn struct{ *pgxConn }

func (c discardingConn) IsValid() bool { return discardAll(c.Conn()) }

// pgxConn has another name than its method Conn, which embedding would hide, and
// with it that it is pgx's.
type pgxConn = stdlib.Conn

// contestants makes each entrant do its work around the connector. Each has one
// connection, which it keeps.
func contestants(g *ground, base driver.Connector, entrants []entrant, do func(*ground, *sql.DB) func(n int) time.Duration) []contestant {
	var cs []contestant
	for _, e := range entrants {
		db := e.open(g, base)
		g.after(func() { db.Close() })
		db.SetMaxOpenConns(1)
		cs = append(cs, contestant{e.name, do(g, db)})
	}
	return cs
}

// lend returns a connector that hands out one pgx connection to all who ask,
// closed after the sitting.
func lend(g *ground, dsn string) driver.Connector {
	cfg := must1(pgx.ParseConfig(dsn))
	conn := must1(stdlib.GetConnector(*cfg).Connect(ctx))
	g.after(func() { conn.Close() })
	return lender{lent{conn.(*pgxConn)}}
}

type lent struct{ *pgxConn }

var _ interface{ Conn() *pgx.Conn } = lent{}

func (lent) Close() error { return nil }

// lendPQ is lend for lib/pq.
func lendPQ(g *ground, dsn string) driver.Connector {
	conn := must1(must1(pq.NewConnector(dsn)).Connect(ctx)).(pqConn)
	g.after(func() { conn.Close() })
	return lender{lentPQ{conn}}
}

// pqConn is what lib/pq's connections can do.
type pqConn interface {
	driver.Conn
	driver.ConnBeginTx
	driver.ConnPrepareContext
	driver.ExecerContext
	driver.NamedValueChecker
	driver.Pinger
	driver.QueryerContext
	driver.SessionResetter
	driver.Validator
}

type lentPQ struct{ pqConn }

func (lentPQ) Close() error { return nil }

type lender struct{ conn driver.Conn }

func (l lender) Connect(context.Context) (driver.Conn, error) { return l.conn, nil }
func (l lender) Driver() driver.Driver                        { return connectorDriver{l} }

// connectorDriver is a connector as a driver, and driverConnector a driver as a
// connector: sqlmw wraps drivers only.
type connectorDriver struct{ connector driver.Connector }

func (d connectorDriver) Open(string) (driver.Conn, error) {
	return d.connector.Connect(ctx)
}

type driverConnector struct{ driver driver.Driver }

func (c driverConnector) Connect(context.Context) (driver.Conn, error) { return c.driver.Open("") }
func (c driverConnector) Driver() driver.Driver                        { return c.driver }
