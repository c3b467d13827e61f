package lockorder

import (
	"fmt"
	"testing"
)

type lock = Lock[int, string]

func x(key int) lock { return lock{Key: key, Site: fmt.Sprint("x", key)} }
func s(key int) lock { return lock{Key: key, Share: true, Site: fmt.Sprint("s", key)} }

func TestOrders(t *testing.T) {
	type wait struct {
		held   []lock
		wanted lock
		found  int
	}
	for name, waits := range map[string][]wait{
		"opposite":                     {{[]lock{x(1)}, x(2), 0}, {[]lock{x(2)}, x(1), 1}},
		"opposite, once":               {{[]lock{x(1)}, x(2), 0}, {[]lock{x(2)}, x(1), 1}, {[]lock{x(2)}, x(1), 0}, {[]lock{x(1)}, x(2), 0}},
		"the same":                     {{[]lock{x(1)}, x(2), 0}, {[]lock{x(1)}, x(2), 0}},
		"share against share":          {{[]lock{s(1)}, s(2), 0}, {[]lock{s(2)}, s(1), 0}},
		"share on one key":             {{[]lock{s(1)}, x(2), 0}, {[]lock{x(2)}, s(1), 0}},
		"share held, exclusive wanted": {{[]lock{s(1)}, x(2), 0}, {[]lock{s(2)}, x(1), 1}},
		"share at first":               {{[]lock{s(1)}, s(2), 0}, {[]lock{x(1)}, x(2), 0}, {[]lock{s(2)}, s(1), 1}},
		"through a third":              {{[]lock{x(1), x(2)}, x(3), 0}, {[]lock{x(3)}, x(1), 1}},
		"behind a gate":                {{[]lock{x(9), x(1)}, x(2), 0}, {[]lock{x(9), x(2)}, x(1), 0}},
		"behind a gate, shared once":   {{[]lock{s(9), x(1)}, x(2), 0}, {[]lock{x(9), x(2)}, x(1), 0}},
		"behind a shared gate":         {{[]lock{s(9), x(1)}, x(2), 0}, {[]lock{s(9), x(2)}, x(1), 1}},
		"gate on one side":             {{[]lock{x(9), x(1)}, x(2), 0}, {[]lock{x(2)}, x(1), 1}},
		"gate taken too late":          {{[]lock{x(1), x(9)}, x(2), 0}, {[]lock{x(2), x(9)}, x(1), 1}},
		"gate missing once":            {{[]lock{x(9), x(1)}, x(2), 0}, {[]lock{x(1)}, x(2), 0}, {[]lock{x(9), x(2)}, x(1), 1}},
		"re-entrant":                   {{[]lock{x(1), x(2)}, x(1), 0}, {[]lock{x(2), x(1)}, x(2), 0}},
		"upgrade, once":                {{[]lock{s(1)}, x(1), 1}, {[]lock{s(1)}, x(1), 0}},
		"downgrade":                    {{[]lock{x(1)}, s(1), 0}},
		"nothing held":                 {{nil, x(1), 0}, {nil, x(2), 0}},
	} {
		t.Run(name, func(t *testing.T) {
			var g Graph[int, string]
			for i, w := range waits {
				if found := g.Wait(w.held, w.wanted); len(found) != w.found {
					t.Errorf("wait %d: %+v, want %d", i, found, w.found)
				}
			}
		})
	}
}

func TestFindingNamesBothOrders(t *testing.T) {
	var g Graph[int, string]
	g.Wait([]lock{{Key: 1, Site: "a"}}, lock{Key: 2, Site: "b"})
	found := g.Wait([]lock{{Key: 2, Site: "c"}}, lock{Key: 1, Site: "d"})
	if len(found) != 1 || found[0].Held.Site != "c" || found[0].Wanted.Site != "d" || found[0].Before[0].Site != "a" || found[0].Before[1].Site != "b" {
		t.Errorf("%+v", found)
	}
}

func TestOldestIsForgotten(t *testing.T) {
	var g Graph[int, string]
	g.Wait([]lock{x(1)}, x(2))
	for i := range maxEdges + 10 {
		g.Wait([]lock{x(10 + 2*i)}, x(11+2*i))
	}
	if len(g.edges) > maxEdges || len(g.told) > maxEdges {
		t.Errorf("%d edges, %d told", len(g.edges), len(g.told))
	}
	if found := g.Wait([]lock{x(2)}, x(1)); len(found) != 0 {
		t.Errorf("not forgotten: %+v", found)
	}
}

func BenchmarkWait(b *testing.B) {
	var g Graph[int, string]
	for i := range 20_000 {
		g.Wait([]lock{x(i)}, x(i+1))
	}
	held := []lock{x(0)}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		held[0].Key = i % 20_000
		g.Wait(held, lock{Key: i%20_000 + 1})
	}
}
