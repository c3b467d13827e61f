package main

// This file owns the question what a busy program notices: many goroutines, few
// connections.

import (
	"database/sql"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
)

const (
	loadWorkers     = 64
	loadConnections = 8
)

// latency is the percentiles of each block, in nanoseconds.
type latency struct{ p50, p99 []float64 }

func runLoad(b *bench) {
	for _, j := range []struct {
		name string
		do   func(db *sql.DB, worker int)
	}{
		{"QueryRow", func(db *sql.DB, _ int) { scanUser(db.QueryRowContext(ctx, statement, 7, 1)) }},
		{"Conn, lock, unlock, Close", func(db *sql.DB, worker int) {
			conn := must1(db.Conn(ctx))
			lock(conn, int64(worker))
			unlock(conn, int64(worker))
			must(conn.Close())
		}},
	} {
		entrants := append([]entrant{plain("pgx"), plain("pgx again"), ours("pgadvlock"), oursSampled()}, resetters(b.server.socket, loadConnections)...)
		latencies := make([]latency, len(entrants))
		r, ok := b.race("load", j.name+", under load", effort{block: 20 * time.Millisecond}, func(g *ground) []contestant {
			var cs []contestant
			for i, e := range entrants {
				db := e.open(g, stdlib.GetConnector(*must1(pgx.ParseConfig(b.server.socket))))
				g.after(func() { db.Close() })
				db.SetMaxOpenConns(loadConnections)
				if i < len(entrants)-1 { // the last one is a pool below
					db.SetMaxIdleConns(loadConnections)
				}
				cs = append(cs, contestant{e.name, func(n int) time.Duration {
					return latencies[i].burst(n, func(worker int) { j.do(db, worker) })
				}})
			}
			return cs
		})
		if !ok {
			continue
		}
		t := b.table(fmt.Sprintf("%s: %d goroutines on %d connections, Unix socket", j.name, loadWorkers, loadConnections),
			"Throughput by pgx's, and the time from asking the pool to having the connection given back.")
		for i, l := range latencies {
			e := r.ratio(i)
			throughput := estimate{1 / e.mid, 1 / e.hi, 1 / e.lo}
			t.line(r.names[i], map[string]string{
				"pieces a second": inverse(r.time(i), 1e9).text(""), // nanoseconds in a second
				"by pgx's":        throughput.text(""),
				"p50":             duration(bootstrap([][]float64{l.p50}, confidence).mid),
				"p99":             duration(bootstrap([][]float64{l.p99}, confidence).mid),
			}, "pieces a second", "by pgx's", "p50", "p99")
		}
	}
}

// burst does n pieces of work with all workers.
func (l *latency) burst(n int, do func(worker int)) time.Duration {
	took := make([]float64, n)
	var next atomic.Int64
	elapsed := together(loadWorkers, func(worker int) {
		for {
			i := int(next.Add(1)) - 1
			if i >= n {
				return
			}
			start := time.Now()
			do(worker)
			took[i] = float64(time.Since(start))
		}
	})
	slices.Sort(took)
	l.p50 = append(l.p50, took[n/2])
	l.p99 = append(l.p99, took[n*99/100])
	return elapsed
}
