package netns

import (
	"flag"
	"fmt"
	"runtime"
	"sync"
	"testing"

	"ipoibcm/control"
)

var dataThreads = flag.Int("threads", 0, "data threads of the agents that a test gives no number; 0: the default")

// offload returns what status says of one.
func (h *host) offload(name string) (o control.Offload) {
	h.seg.Helper()
	for _, o := range h.status().Underlay.Offloads {
		if o.Name == name {
			return o
		}
	}
	h.seg.Fatalf("host %d: status says nothing of %s", h.i, name)
	return o
}

// A host with several data threads beside hosts with fewer and more: everything arrives whole,
// both ways at once, packets come to the thread of their queue pair, and all threads read the
// interface.
func TestDataThreads(t *testing.T) {
	parallel(t)
	for _, mode := range []string{"rc", "uc", "ud"} {
		t.Run(mode, func(t *testing.T) {
			parallel(t)
			s := newSegment(t, topology{hosts: 4})
			for i, threads := range []string{"3", "1", "2", "5"} {
				s.hosts[i].run("--mode", mode, "--threads", threads)
			}
			hub := s.hosts[0]
			for _, p := range s.hosts[1:] {
				both(p, hub.reach)
				if mode != "ud" {
					hub.paired(p, map[string]string{"rc": "RC", "uc": "UC"}[mode])
				}
			}
			var wg sync.WaitGroup
			for _, p := range s.hosts[1:] {
				wg.Go(func() { hub.send(p, p.v4, 8<<20) })
				wg.Go(func() { p.send(hub, hub.v6, 8<<20) })
			}
			wg.Wait()
			for i, want := range []int{3, 1, 2, 5} {
				h := s.hosts[i]
				if got := h.status().Interface.Threads; got != want {
					t.Errorf("host %d: %d threads, want %d", i, got, want)
				}
				if want == 1 {
					continue
				}
				for _, name := range []string{"steering", "queues"} {
					if o := h.offload(name); !o.On {
						t.Errorf("host %d: %+v, want it on", i, o)
					}
				}
				// A chain that the kernel has put together may have a datagram in it.
				if all, other := h.counter("softroce", "rx_packets"), h.counter("softroce", "rx_other_thread"); other > all/100 {
					t.Errorf("host %d: %d of %d packets came to another thread than that of their queue pair", i, other, all)
				}
			}
			out, _, _ := hub.output("status", "--verbose", "--control", hub.path(".sock"))
			if err := containsAll(out, "data threads", "steering: packets to the thread of their queue pair"); err != nil {
				t.Error(err)
			}
		})
	}
}

// An interface with several queues outlives its process, and has as many again. With another kind
// of queues it is made anew.
func TestHandOverThreads(t *testing.T) {
	parallel(t)
	_, a, b := newPair(t)
	b.run("--threads", "2")
	k := newKeeper(a)
	k.start("--threads", "3")
	a.connect(b, "RC")
	index, link := a.index(ifName), a.link()
	for _, tt := range []struct {
		threads int
		same    bool
	}{{3, true}, {2, true}, {1, false}, {4, false}} {
		k.restart("--threads", fmt.Sprint(tt.threads))
		a.connect(b, "RC")
		if got := a.index(ifName); (got == index) != tt.same {
			t.Errorf("%d threads: interface %d, and it was %d; want the same: %v", tt.threads, got, index, tt.same)
		}
		index = a.index(ifName)
		if got := a.link(); got != link {
			t.Errorf("%d threads: link-layer address %s, want %s", tt.threads, got, link)
		}
		if got := a.status().Interface.Threads; got != tt.threads {
			t.Errorf("%d threads, want %d", got, tt.threads)
		}
		a.send(b, b.v4, 1<<20)
		b.send(a, a.v6, 1<<20)
		if tt.threads > 1 {
			if n := a.counter("softroce", "rx_other_thread"); n > a.counter("softroce", "rx_packets")/100 {
				t.Errorf("%d threads: %d packets came to another thread than that of their queue pair", tt.threads, n)
			}
		}
	}
}

// With auto there are as many threads as processors, and one on two of them and where the interface is there
// already with one queue: nobody's, or that of a process before.
func TestAutoThreads(t *testing.T) {
	parallel(t)
	s := newSegment(t, topology{hosts: 3})
	a, b, there := s.hosts[0], s.hosts[1], s.hosts[2]
	want := min(4, runtime.GOMAXPROCS(0))
	if want == 2 {
		want = 1
	}
	b.run("--threads", "auto")
	if got := b.status().Interface.Threads; got != want {
		t.Errorf("%d threads, want %d", got, want)
	}

	there.ip("tuntap add dev " + ifName + " mode tun")
	index := there.index(ifName)
	if _, text, status := there.output("run", "--underlay", underlay, "--name", ifName,
		"--control", there.path(".three"), "--threads", "3"); status != 1 {
		t.Errorf("three threads on an interface that is there: status %d, %s", status, text)
	}
	there.run("--threads", "auto")
	if got := there.index(ifName); got != index {
		t.Errorf("the interface that was there: interface %d, want %d", got, index)
	}
	if got := there.status().Interface.Threads; got != 1 {
		t.Errorf("the interface that was there: %d threads, want 1", got)
	}
	there.connect(b, "RC")

	k := newKeeper(a)
	k.start("--threads", "1")
	index = a.index(ifName)
	k.restart("--threads", "auto")
	a.connect(b, "RC")
	if got := a.index(ifName); got != index {
		t.Errorf("from one thread to auto: interface %d, want %d", got, index)
	}
	if got := a.status().Interface.Threads; got != 1 {
		t.Errorf("from one thread to auto: %d threads, want 1", got)
	}
}
