package main

// This file owns the method: who is measured when, and what the times say. It
// knows nothing of drivers.
//
// Contestants do the same work in small blocks, a few hundred microseconds to a
// few milliseconds each, in rounds of a random order, so that whatever slows the
// machine down meets all of them. What counts is not a time but what became of
// it in the same round: own time by the floor's time (or less the floor's time).
// The figure is the median of those, its interval a bootstrap over sittings and
// over the rounds within: each sitting has new connections, new contestants and
// another place in memory for all of them.

import (
	"context"
	"math"
	"math/rand/v2"
	"runtime"
	"runtime/pprof"
	"slices"
	"testing"
	"time"
)

// contestant is one of those that do the same work.
type contestant struct {
	name string
	run  func(n int) time.Duration // does the work n times, and says how long that took
}

// work makes a contestant's run of one piece of work.
func work(piece func()) func(n int) time.Duration {
	return func(n int) time.Duration {
		start := time.Now()
		for range n {
			piece()
		}
		return time.Since(start)
	}
}

// effort is how much is spent on a race.
type effort struct {
	sittings int
	sitting  time.Duration // how long each lasts
	block    time.Duration // how long the floor's block lasts, about
	max      int           // the largest block, in pieces of work; 0 is no limit
	heavy    bool          // a sitting takes long to prepare, so there are two
}

// The first contestants are the same in all races: the floor, the floor again,
// and whom it is about. The others, peers, are in every peerRounds'th round only.
const (
	floor = iota
	again
	first
	peers
	peerRounds = 4
)

// pair is how long one piece of work took in two blocks of one round, in
// nanoseconds.
type pair struct{ floor, own float64 }

func ratio(p pair) float64 { return p.own / p.floor }
func more(p pair) float64  { return p.own - p.floor }
func own(p pair) float64   { return p.own }

// result is what a race gave.
type result struct {
	names  []string
	pairs  [][][]pair // of each contestant, in each sitting
	allocs []float64  // of one piece of work of each contestant
	twice  bool       // the first race was thrown away: see raceFairly
}

// estimate is a figure with the interval that it lies in.
type estimate struct{ mid, lo, hi float64 }

func (e estimate) contains(x float64) bool { return e.lo <= x && x <= e.hi }

const (
	confidence      = 0.95
	floorConfidence = 0.99 // there are dozens of floors in a run, and any of them stops it
	resamples       = 1000
)

// race has contestants do their work. open is called for each sitting; what it
// hands to the ground is closed after it.
func race(e effort, open func(*ground) []contestant) result {
	var r result
	for sitting := range e.sittings {
		r.sit(e, open, sitting == e.sittings-1)
	}
	return r
}

// raceFairly is race, once more if the floor disagrees with itself: something
// else than the contestants was measured then.
func raceFairly(e effort, open func(*ground) []contestant) result {
	r := race(e, open)
	if !r.fair() {
		r = race(e, open)
		r.twice = true
	}
	return r
}

func (r *result) sit(e effort, open func(*ground) []contestant, last bool) {
	var g ground
	defer g.close()
	cs := open(&g)
	if r.pairs == nil {
		r.pairs = make([][][]pair, len(cs))
		for _, c := range cs {
			r.names = append(r.names, c.name)
		}
	}
	n := 1
	for ; min(cs[floor].run(n), cs[floor].run(n)) < e.block && (e.max == 0 || n < e.max); n *= 2 {
	}
	labels := make([]context.Context, len(cs))
	for i, c := range cs {
		c.run(n) // warm
		labels[i] = pprof.WithLabels(context.Background(), pprof.Labels("who", c.name))
		r.pairs[i] = append(r.pairs[i], nil)
	}
	runtime.GC()
	sitting := len(r.pairs[floor]) - 1
	took := make([]float64, len(cs))
	order := make([]int, 0, len(cs))
	for began, round := time.Now(), 0; time.Since(began) < e.sitting || round <= peerRounds; round++ {
		order = order[:0]
		for i := range cs {
			if i < peers || round%peerRounds == 0 {
				order = append(order, i)
			}
		}
		rand.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		for _, i := range order {
			pprof.SetGoroutineLabels(labels[i])
			took[i] = float64(cs[i].run(n)) / float64(n)
		}
		for _, i := range order {
			r.pairs[i][sitting] = append(r.pairs[i][sitting], pair{took[floor], took[i]})
		}
	}
	pprof.SetGoroutineLabels(context.Background())
	if !last {
		return
	}
	for _, c := range cs {
		r.allocs = append(r.allocs, testing.AllocsPerRun(1, func() { c.run(100) })/100)
	}
}

// of is the figure of a contestant, by what is asked of each pair.
func (r result) of(i int, ask func(pair) float64, confidence float64) estimate {
	groups := make([][]float64, len(r.pairs[i]))
	for s, pairs := range r.pairs[i] {
		for _, p := range pairs {
			groups[s] = append(groups[s], ask(p))
		}
	}
	return bootstrap(groups, confidence)
}

func (r result) ratio(i int) estimate { return r.of(i, ratio, confidence) }
func (r result) more(i int) estimate  { return r.of(i, more, confidence) }
func (r result) time(i int) estimate  { return r.of(i, own, confidence) }

// moreAllocs is how many allocations a contestant makes more than the floor, to a
// tenth: something else in the program may allocate in the meantime.
func (r result) moreAllocs(i int) float64 { return math.Round(10*(r.allocs[i]-r.allocs[floor])) / 10 }

// fair reports whether the floor, measured as a contestant, is its own equal.
func (r result) fair() bool { return r.of(again, ratio, floorConfidence).contains(1) }

// blur is how far from 1 the floor's own interval reaches: what is smaller
// cannot be told from nothing.
func (r result) blur() float64 {
	e := r.ratio(again)
	return max(e.hi-1, 1-e.lo)
}

// bootstrap returns the median of all values, and the interval that the median
// lies in when sittings, and values within each, are drawn anew (with
// replacement) many times.
func bootstrap(groups [][]float64, confidence float64) estimate {
	sorted := slices.Concat(groups...)
	slices.Sort(sorted)
	ranks := make([][]int, len(groups)) // drawing ranks, a median is found by counting
	for g, values := range groups {
		for _, v := range values {
			rank, _ := slices.BinarySearch(sorted, v)
			ranks[g] = append(ranks[g], rank)
		}
	}
	random := rand.New(rand.NewPCG(1, 2)) // the same data, the same interval
	medians := make([]float64, resamples)
	counts := make([]int, len(sorted))
	for m := range medians {
		clear(counts)
		drawn := 0
		for range groups {
			group := ranks[random.IntN(len(ranks))]
			for range group {
				counts[group[random.IntN(len(group))]]++
			}
			drawn += len(group)
		}
		medians[m] = medianOfCounts(sorted, counts, drawn)
	}
	slices.Sort(medians)
	tail := (1 - confidence) / 2
	return estimate{
		mid: median(sorted),
		lo:  medians[int(tail*resamples)],
		hi:  medians[int(math.Ceil((1-tail)*resamples))-1],
	}
}

// median of sorted values.
func median(sorted []float64) float64 {
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// medianOfCounts is the median of values of which each occurs so many times.
func medianOfCounts(sorted []float64, counts []int, n int) float64 {
	seen, low, found := 0, 0.0, false
	for i, c := range counts {
		if c == 0 {
			continue
		}
		seen += c
		if !found && seen > (n-1)/2 {
			low, found = sorted[i], true
		}
		if seen > n/2 {
			return (low + sorted[i]) / 2
		}
	}
	return low
}

// ground is what contestants stand on: it is cleared after each sitting, last
// things first.
type ground struct{ closers []func() }

func (g *ground) after(f func()) { g.closers = append(g.closers, f) }

func (g *ground) close() {
	for _, f := range slices.Backward(g.closers) {
		f()
	}
}

// failure is an error of the contestants' work: nothing was measured.
type failure struct{ error }

func must(err error) {
	if err != nil {
		panic(failure{err})
	}
}

func must1[T any](v T, err error) T {
	must(err)
	return v
}
