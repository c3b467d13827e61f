package main

// This file owns the question what grows: with the locks held, the keys seen, the
// connections open, the length of a statement. All on a driver that does nothing,
// which grows with nothing, so that what grows is ours.

import (
	"cmp"
	"database/sql"
	"fmt"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pgadvlock/pgadvlock"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"
)

// curve is a plot in docs/.
type curve struct {
	file, title, x, y string
	logY              bool
	series            []series
}

type series struct {
	name   string
	points []point
}

type point struct {
	x float64
	y estimate
}

// flatLimit is what a curve may rise while its size grows a hundredfold, and still
// be called flat: room for what a map does that outgrows the processor's caches,
// not for a list that is searched.
const flatLimit = 1.5

// sizes leaves the large ones out when time is short.
func sizes(b *bench, full ...int) []int {
	if b.short {
		return full[:min(len(full), 4)]
	}
	return full
}

// grow races sizes: each does the same work on ground that it has prepared. The
// largest is judged by the one a hundred times smaller, two before it.
func grow(b *bench, name string, e effort, sizes []int, prepare func(g *ground, size int) func(n int) time.Duration) series {
	base, last := sizes[len(sizes)-3], sizes[len(sizes)-1]
	order := []int{base, base, last}
	for _, n := range sizes {
		if n != base && n != last {
			order = append(order, n)
		}
	}
	s := series{name: name}
	r, ok := b.race("growth", name, e, func(g *ground) []contestant {
		var cs []contestant
		for _, n := range order {
			cs = append(cs, contestant{strconv.Itoa(n), prepare(g, n)})
		}
		return cs
	})
	if !ok {
		return s
	}
	for i, n := range order {
		if i != again {
			s.points = append(s.points, point{float64(n), r.time(i)})
		}
	}
	slices.SortFunc(s.points, func(p, q point) int { return cmp.Compare(p.x, q.x) })
	b.judge(barRatio(fmt.Sprintf("growth: %s, %d by %d", name, last, base), flatLimit, r))
	return s
}

// direct is pgadvlock on a driver that does nothing, told that nothing stands
// between.
func direct(g *ground) *sql.DB {
	db := ours("", pgadvlock.WithPoolMode(pgadvlock.PoolDirect)).open(g, fakeConnector{})
	g.after(func() { db.Close() })
	return db
}

func connOf(g *ground, db *sql.DB) *sql.Conn {
	c := must1(db.Conn(ctx))
	g.after(func() { c.Close() })
	return c
}

func runGrowth(b *bench) {
	held := grow(b, "locks held", effort{block: 100 * time.Microsecond}, sizes(b, 1, 10, 100, 1000, 10_000),
		func(g *ground, size int) func(n int) time.Duration {
			c := connOf(g, direct(g))
			for i := range size {
				lock(c, int64(i))
			}
			return work(func() {
				lock(c, -1)
				unlock(c, -1)
			})
		})
	b.curve(curve{file: "lock-by-held.svg", title: "Lock and unlock, by the locks that the connection holds", x: "locks held", y: "ns", series: []series{held}})

	keys := effort{block: 200 * time.Microsecond, heavy: true}
	asParameter := grow(b, "keys seen, as parameters", keys, sizes(b, 1, 10, 100, 1000, 10_000, 100_000, 1_000_000),
		func(g *ground, size int) func(n int) time.Duration {
			return seen(g, size, func(c *sql.Conn, key int64) {
				lock(c, key)
				unlock(c, key)
			})
		})
	inText := grow(b, "keys seen, in the text", keys, sizes(b, 1, 10, 100, 1000, 10_000, 100_000, 1_000_000),
		func(g *ground, size int) func(n int) time.Duration {
			return seen(g, size, func(c *sql.Conn, key int64) {
				n := strconv.FormatInt(key, 10)
				must1(c.ExecContext(ctx, "SELECT pg_advisory_lock("+n+")"))
				must1(c.ExecContext(ctx, "SELECT pg_advisory_unlock("+n+")"))
			})
		})
	b.curve(curve{file: "lock-by-keys.svg", title: "Lock and unlock while another lock is held, by the keys in use", x: "distinct keys, used in turn", y: "ns", series: []series{asParameter, inText}})

	connections := grow(b, "connections", effort{block: 100 * time.Microsecond}, sizes(b, 1, 10, 100, 1000),
		func(g *ground, size int) func(n int) time.Duration {
			db := direct(g)
			for range size - 1 {
				lockUnlock(connOf(g, db))
			}
			c := connOf(g, db)
			return work(func() { lockUnlock(c) })
		})
	b.curve(curve{file: "lock-by-connections.svg", title: "Lock and unlock, by the open connections", x: "connections", y: "ns", series: []series{connections}})

	runLength(b)
	runBytes(b)
}

// seen prepares a connection that holds one lock, and takes so many others in turn
// while it does: each was seen before, the longest ago.
func seen(g *ground, size int, takeAndGive func(c *sql.Conn, key int64)) func(n int) time.Duration {
	c := connOf(g, direct(g))
	lock(c, -1)
	next := 0
	piece := func() {
		takeAndGive(c, int64(next))
		if next++; next == size {
			next = 0
		}
	}
	for range size {
		piece()
	}
	return work(piece)
}

// runLength asks what the length of a text costs, with and without a lock call in
// it. A comment makes lock statements long.
func runLength(b *bench) {
	lengths := sizes(b, 60, 1<<10, 10<<10, 100<<10)
	var without, with series
	without.name, with.name = "no lock call", "lock and unlock"
	for _, n := range lengths {
		name := "Query of " + bytesText(n)
		race := func(name string, do func(g *ground, db *sql.DB) func(n int) time.Duration) (result, bool) {
			return b.race("growth", name, effort{block: 100 * time.Microsecond}, func(g *ground) []contestant {
				return contestants(g, fakeConnector{}, []entrant{
					plain("inner"), plain("inner again"), ours("pgadvlock", pgadvlock.WithPoolMode(pgadvlock.PoolDirect)),
				}, do)
			})
		}
		text := statement
		if n > len(text) {
			text = ormText(n)
		}
		if r, ok := race(name, onConn("", query(text)).do); ok {
			without.points = append(without.points, point{float64(n), r.more(first)})
			if n > len(statement) {
				b.judge(barMore(name+", fake driver", 15+float64(n)/6, r)) // 6 GB/s are 6 bytes a nanosecond
			}
		}
		padded := func(call string) string { return call + " --" + strings.Repeat(" ", max(n-len(call)-3, 0)) }
		locks, unlocks := padded(lockText), padded(unlockText)
		if r, ok := race("lock and unlock of "+bytesText(n), onConn("", func(c *sql.Conn) {
			must1(c.ExecContext(ctx, locks, key))
			must1(c.ExecContext(ctx, unlocks, key))
		}).do); ok {
			with.points = append(with.points, point{float64(n), r.more(first)})
		}
	}
	b.curve(curve{file: "statement-by-length.svg", title: "What a statement costs more, by its length", x: "bytes", y: "ns more than the driver underneath", logY: true, series: []series{without, with}})
}

// runBytes asks what a clean connection holds in memory.
func runBytes(b *bench) {
	if !b.wanted("bytes") {
		return
	}
	heap := func(count int, open func(g *ground) *sql.DB, use func(*sql.Conn)) float64 {
		var g ground
		defer g.close()
		db := open(&g)
		connOf(&g, db) // what belongs to the Connector is there now
		before := heapNow()
		conns := make([]*sql.Conn, count)
		for i := range conns {
			conns[i] = connOf(&g, db)
			use(conns[i])
		}
		after := heapNow()
		runtime.KeepAlive(conns)
		return float64(after-before) / float64(count)
	}
	inner := func(g *ground) *sql.DB {
		db := sql.OpenDB(fakeConnector{})
		g.after(func() { db.Close() })
		return db
	}
	never, once := series{name: "never locked"}, series{name: "has locked"}
	for _, n := range sizes(b, 10, 100, 1000) {
		base := heap(n, inner, func(*sql.Conn) {})
		for _, s := range []struct {
			*series
			use func(*sql.Conn)
		}{{&never, func(*sql.Conn) {}}, {&once, lockUnlock}} {
			bytes := heap(n, direct, s.use) - base
			s.points = append(s.points, point{float64(n), estimate{bytes, bytes, bytes}})
		}
	}
	last := len(never.points) - 1
	b.note(fmt.Sprintf("A clean connection holds %.0f bytes more than the driver's own, and %.0f once it has taken a lock (of %.0f connections).",
		never.points[last].y.mid, once.points[last].y.mid, never.points[last].x))
	b.curve(curve{file: "bytes-by-connections.svg", title: "Bytes that a clean connection holds, by the open connections", x: "connections", y: "bytes", series: []series{never, once}})
}

func heapNow() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // what finalizers and pools kept over the first
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// save draws the curve.
func (c curve) save(dir string) error {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = c.title, c.x, c.y
	p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, thousands{plot.LogTicks{}}
	p.Y.Tick.Marker = thousands{plot.DefaultTicks{}}
	if c.logY {
		p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, thousands{plot.LogTicks{}}
	} else {
		p.Y.Min = 0
	}
	p.Add(plotter.NewGrid())
	p.Legend.Top, p.Legend.Left = true, true
	for i, s := range c.series {
		if len(s.points) == 0 {
			return nil
		}
		line, dots, err := plotter.NewLinePoints(s)
		if err != nil {
			return err
		}
		bars, err := plotter.NewYErrorBars(s)
		if err != nil {
			return err
		}
		line.Color, dots.Color, dots.Shape, bars.Color = plotutil.Color(i), plotutil.Color(i), plotutil.Shape(i), plotutil.Color(i)
		p.Add(line, dots, bars)
		p.Legend.Add(s.name, line, dots)
	}
	if !c.logY {
		p.Y.Max *= 1.3 // room for the legend
	}
	return p.Save(18*vg.Centimeter, 11*vg.Centimeter, filepath.Join(dir, c.file))
}

// thousands labels ticks as people write numbers: 10,000.
type thousands struct{ plot.Ticker }

func (t thousands) Ticks(low, high float64) []plot.Tick {
	ticks := t.Ticker.Ticks(low, high)
	for i := range ticks {
		if ticks[i].Label == "" {
			continue
		}
		ticks[i].Label = thousandsOf(ticks[i].Value)
	}
	return ticks
}

func thousandsOf(x float64) string {
	digits := strconv.FormatFloat(x, 'f', -1, 64)
	for at := len(digits) - 3; at > 0; at -= 3 {
		digits = digits[:at] + "," + digits[at:]
	}
	return digits
}

// Len, XY and YError make a series what the plotters take.
func (s series) Len() int                { return len(s.points) }
func (s series) XY(i int) (x, y float64) { return s.points[i].x, max(s.points[i].y.mid, 1) }
func (s series) YError(i int) (low, high float64) {
	y := s.points[i].y
	_, mid := s.XY(i)
	return max(mid-max(y.lo, 1), 0), max(y.hi-mid, 0)
}

func bytesText(n int) string {
	switch {
	case n >= 1<<10:
		return strconv.Itoa(n>>10) + " KB"
	}
	return strconv.Itoa(n) + " bytes"
}
