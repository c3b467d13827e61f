// Package lockorder remembers in which order keys are locked, and finds two
// that are locked in opposite orders: a deadlock, found without one.
//
// It keeps a bounded number of orders and forgets the oldest. It knows nothing
// of connections or SQL: a key is whatever is comparable.
package lockorder

import (
	"hash/maphash"
	"sync"
)

const (
	// maxEdges bounds the memory of a Graph.
	maxEdges = 1 << 14
	// maxHeld is how many of the locks held last are put in order with a new
	// one, so that a session that holds thousands pays for a few.
	maxHeld = 16
)

// Lock is a lock that a session holds or is about to wait for. Site is handed
// back in a [Finding].
type Lock[Key comparable, Site any] struct {
	Key   Key
	Share bool
	Site  Site
}

// Finding is two locks in opposite orders, or one that is upgraded.
type Finding[Key comparable, Site any] struct {
	Held, Wanted Lock[Key, Site] // now
	// Before is the opposite order, as it was seen first: the lock that was
	// held, and the one that was waited for. Of an upgrade both are zero.
	Before  [2]Lock[Key, Site]
	Upgrade bool // Held is the share lock that Wanted, of the same key, excludes in others
}

// Graph is the orders seen so far. The zero value is empty and ready. It is
// safe for concurrent use.
type Graph[Key comparable, Site any] struct {
	mu    sync.Mutex // guards all below
	seed  maphash.Seed
	edges map[pair]*edge[Key, Site]
	told  map[pair]struct{}
	ring  [maxEdges]pair // of the edges, oldest overwritten first
	next  int
}

// pair is the hashes of two keys. That two keys have one hash of 64 bits is
// taken never to happen.
type pair struct{ from, to uint64 }

// either is one of the two pairs of the same keys.
func (p pair) either() pair { return pair{min(p.from, p.to), max(p.from, p.to)} }

// edge is one order: to was waited for while from was held.
type edge[Key comparable, Site any] struct {
	from, to Lock[Key, Site]
	gates    map[uint64]bool // what was held before from: true when exclusively
}

// Wait enters that a session which holds the locks, oldest first, is about to
// wait for another one, and returns what is wrong with that: each pair of keys
// once. A share lock is no danger to another one, nor are two orders that both
// stand behind one gate: a third lock that was taken before, at least once
// exclusively.
func (g *Graph[K, S]) Wait(held []Lock[K, S], wanted Lock[K, S]) (found []Finding[K, S]) {
	if len(held) == 0 {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.edges == nil {
		g.seed = maphash.MakeSeed()
		g.edges, g.told = make(map[pair]*edge[K, S]), make(map[pair]struct{})
	}
	to := maphash.Comparable(g.seed, wanted.Key)
	recent := held[max(0, len(held)-maxHeld):]
	hashes := make([]uint64, len(recent))
	for i, h := range recent {
		hashes[i] = maphash.Comparable(g.seed, h.Key)
		if hashes[i] == to && (h.Share == wanted.Share || !h.Share) {
			return nil // held already, in that mode or the stricter one: it will not wait
		}
	}
	for i, h := range recent {
		p := pair{hashes[i], to}
		if p.from == p.to {
			if h.Share && g.tell(p) {
				found = append(found, Finding[K, S]{Held: h, Wanted: wanted, Upgrade: true})
			}
			continue
		}
		e := g.enter(p, h, wanted, recent[:i], hashes[:i])
		back := g.edges[pair{to, hashes[i]}]
		if back == nil || !conflict(h, back.to) || !conflict(wanted, back.from) || gated(e.gates, back.gates) {
			continue
		}
		if g.tell(p) {
			found = append(found, Finding[K, S]{Held: h, Wanted: wanted, Before: [2]Lock[K, S]{back.from, back.to}})
		}
	}
	return found
}

// enter remembers an order. The strictest modes and the fewest gates count,
// whichever time they were seen.
func (g *Graph[K, S]) enter(p pair, from, to Lock[K, S], before []Lock[K, S], hashes []uint64) *edge[K, S] {
	e := g.edges[p]
	if e == nil {
		old := g.ring[g.next]
		delete(g.edges, old)
		delete(g.told, old.either())
		g.ring[g.next] = p
		g.next = (g.next + 1) % maxEdges
		e = &edge[K, S]{from: from, to: to}
		for i, b := range before {
			if e.gates == nil {
				e.gates = make(map[uint64]bool)
			}
			e.gates[hashes[i]] = e.gates[hashes[i]] || !b.Share
		}
		g.edges[p] = e
		return e
	}
	e.from.Share = e.from.Share && from.Share
	e.to.Share = e.to.Share && to.Share
	for gate := range e.gates {
		still := false
		for i := range before {
			still = still || hashes[i] == gate
		}
		if !still {
			delete(e.gates, gate)
		}
	}
	return e
}

// tell reports whether a pair has not been told of yet, in either order.
func (g *Graph[K, S]) tell(p pair) bool {
	p = p.either()
	if _, told := g.told[p]; told {
		return false
	}
	if len(g.told) >= maxEdges {
		clear(g.told)
	}
	g.told[p] = struct{}{}
	return true
}

func conflict[K comparable, S any](a, b Lock[K, S]) bool { return !a.Share || !b.Share }

// gated reports whether both orders stand behind one lock that at least one of
// them held exclusively.
func gated(a, b map[uint64]bool) bool {
	for gate, exclusive := range a {
		if other, ok := b[gate]; ok && (exclusive || other) {
			return true
		}
	}
	return false
}
