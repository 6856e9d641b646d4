package sa_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/simsm"
	"ipoibcm/sa"
	wire "ipoibcm/wire/sa"
)

var broadcast = ib.GID{0: 0xff, 1: 0x12, 2: 0x40, 3: 0x1b, 4: 0xff, 5: 0xff, 12: 0xff, 13: 0xff, 14: 0xff, 15: 0xff}

func group(n byte) ib.GID { return ib.GID{0: 0xff, 1: 0x12, 2: 0x40, 3: 0x1b, 4: 0xff, 5: 0xff, 15: n} }

func full(mgid ib.GID) sa.Join {
	return sa.Join{MGID: mgid, PKey: ib.DefaultPKey, State: wire.FullMember, Create: mgid != broadcast,
		Params: simsm.DefaultParams}
}

// members returns how many ports are members of a group.
func members(w *simsm.World, mgid ib.GID) int { return len(w.Members(mgid)) }

// TestAdminForgets: however the administrator comes to forget its members, they are
// back in time.
func TestAdminForgets(t *testing.T) {
	const hosts = 20
	for _, tt := range []struct {
		name   string
		opt    simsm.Options
		happen func(w *simsm.World)
		within time.Duration
	}{
		{"it asks to register again", simsm.Options{}, func(w *simsm.World) { w.Start(w.Now) }, 2 * time.Second},
		{"it says nothing", simsm.Options{Quiet: true}, func(w *simsm.World) { w.Start(w.Now) }, 2*time.Minute + time.Second},
		{"it is away for a minute", simsm.Options{Quiet: true}, func(w *simsm.World) {
			w.Stop()
			for _, h := range w.Hosts { // which notice when they ask for something
				w.Step(h, sa.Query{PathKey: sa.PathKey{DGID: w.Hosts[0].GID(), PKey: ib.DefaultPKey}})
			}
			w.Run(time.Minute, nil)
			w.Start(w.Now)
		}, 2 * time.Second},
		{"the links were down", simsm.Options{}, func(w *simsm.World) {
			for _, h := range w.Hosts {
				w.SetLink(w.Now, h.Port, false)
			}
			w.Run(time.Second, nil)
			for _, h := range w.Hosts {
				w.SetLink(w.Now, h.Port, true)
			}
		}, 2 * time.Second},
		{"some MADs are lost", simsm.Options{Loss: 0.1, Dup: 0.1, Jitter: 10 * time.Millisecond},
			func(w *simsm.World) { w.Start(w.Now) }, 20 * time.Second},
		{"it is busy", simsm.Options{Busy: 0.5}, func(w *simsm.World) { w.Start(w.Now) }, 20 * time.Second},
	} {
		tt.opt.Seed = 7
		w := simsm.NewWorld(hosts, tt.opt, sa.Options{})
		for _, h := range w.Hosts {
			w.Step(h, full(broadcast))
			w.Step(h, full(group(1)))
		}
		all := func() bool { return members(w, broadcast) == hosts && members(w, group(1)) == hosts }
		if !w.Run(20*time.Second, all) {
			t.Errorf("%s: %d of %d joined to begin with", tt.name, members(w, broadcast), hosts)
			continue
		}
		w.Run(time.Second, nil)
		tt.happen(w)
		if members(w, broadcast) != 0 {
			t.Errorf("%s: the administrator has not forgotten", tt.name)
		}
		begin := w.Now
		if !w.Run(tt.within, all) {
			t.Errorf("%s: %d of %d are back after %v", tt.name, members(w, broadcast), hosts, tt.within)
		}
		t.Logf("%s: back after %v", tt.name, w.Now.Sub(begin))
	}
}

// TestNoFlood: while nobody answers, each port sends one MAD at a time, however many
// groups it has.
func TestNoFlood(t *testing.T) {
	w := simsm.NewWorld(1, simsm.Options{}, sa.Options{Spread: -1})
	for n := range byte(100) {
		w.Step(w.Hosts[0], full(group(n)))
	}
	w.Run(time.Second, nil)
	if got := len(w.Groups()); got != 101 {
		t.Fatalf("%d groups, want 100 and the broadcast group", got)
	}
	w.Stop()
	w.Step(w.Hosts[0], sa.Reregister{})
	before := w.Stats.Lost
	w.Run(time.Minute, nil)
	if got := w.Stats.Lost - before; got < 30 || got > 45 {
		t.Errorf("%d MADs in a minute, want about one in 1.5 s", got)
	}
}

// TestLastLeaveDeletes: the group ends with its last member, whoever still sends;
// who sends learns of it, and joins again when it is made again.
func TestLastLeaveDeletes(t *testing.T) {
	w := simsm.NewWorld(2, simsm.Options{}, sa.Options{})
	var seen []string
	w.Seen = func(h *simsm.Host, a sa.Action) {
		switch a := a.(type) {
		case sa.Joined:
			seen = append(seen, fmt.Sprintf("%d joined", h.GUID))
		case sa.JoinFailed:
			seen = append(seen, fmt.Sprintf("%d failed, no group %v", h.GUID, a.NoGroup))
		case sa.Left:
			seen = append(seen, fmt.Sprintf("%d left", h.GUID))
		}
	}
	sender, member := w.Hosts[0], w.Hosts[1]
	w.Step(sender, sa.Subscribe{Trap: wire.TrapGroupCreated})
	w.Step(sender, sa.Subscribe{Trap: wire.TrapGroupDeleted})
	w.Step(sender, sa.Join{MGID: group(1), PKey: ib.DefaultPKey, State: wire.SendOnlyNonMember})
	w.Run(500*time.Millisecond, nil)
	w.Step(member, full(group(1)))
	w.Run(100*time.Millisecond, nil)
	w.Step(member, sa.Leave{MGID: group(1)})
	w.Run(100*time.Millisecond, nil)
	if w.Members(group(1)) != nil {
		t.Error("the group is still there")
	}
	w.Step(member, full(group(1)))
	w.Run(100*time.Millisecond, nil)
	want := []string{"1 failed, no group true", "2 joined", "1 joined", "1 failed, no group true", "2 left",
		"1 failed, no group true", "2 joined", "1 joined"}
	if fmt.Sprint(seen) != fmt.Sprint(want) {
		t.Errorf("got %q\nwant %q", seen, want)
	}
}

// TestChaos: users that come and go, and an administrator that loses, doubles, delays and
// refuses, stops and starts. In the end everybody is a member of what it wants.
func TestChaos(t *testing.T) {
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 1))
		w := simsm.NewWorld(4, simsm.Options{Seed: seed, Loss: 0.2, Dup: 0.1, Busy: 0.1, Jitter: 300 * time.Millisecond},
			sa.Options{Refresh: 30 * time.Second, MaxInFlight: 3})
		want := map[*simsm.Host]map[ib.GID]bool{}
		for _, h := range w.Hosts {
			want[h] = map[ib.GID]bool{}
			w.Step(h, sa.Subscribe{Trap: wire.TrapGroupDeleted})
		}
		for range 200 {
			happen(w, r, want)
			w.Run(time.Duration(r.IntN(2000))*time.Millisecond, nil)
		}
		w.Loss, w.Busy, w.Dup = 0, 0, 0
		w.Start(w.Now)
		for _, h := range w.Hosts {
			w.SetLink(w.Now, h.Port, true)
		}
		settled := func() bool { return missing(w, want) == "" }
		if !w.Run(40*time.Second, settled) {
			t.Errorf("seed %d: %s", seed, missing(w, want))
		}
	}
}

// happen does one thing to one host, or to the administrator.
func happen(w *simsm.World, r *rand.Rand, want map[*simsm.Host]map[ib.GID]bool) {
	h := w.Hosts[r.IntN(len(w.Hosts))]
	g := group(byte(r.IntN(5)))
	switch r.IntN(20) {
	case 0:
		w.Stop()
	case 1, 2:
		w.Start(w.Now)
	case 3:
		w.SetLink(w.Now, h.Port, !h.Up)
	case 4:
		w.Relabel(w.Now, h.Port)
	case 5, 6, 7, 8:
		w.Step(h, sa.Leave{MGID: g})
		delete(want[h], g)
	case 9, 10, 11:
		to := w.Hosts[r.IntN(len(w.Hosts))]
		w.Step(h, sa.Query{PathKey: sa.PathKey{DGID: to.GID(), PKey: ib.DefaultPKey}})
	default:
		w.Step(h, full(g))
		want[h][g] = true
	}
}

// missing says what is not as it is wanted.
func missing(w *simsm.World, want map[*simsm.Host]map[ib.GID]bool) string {
	for i, h := range w.Hosts {
		for g := range want[h] {
			if w.Members(g)[h.GID()]&wire.FullMember == 0 {
				return fmt.Sprintf("host %d is no member of %v", i, g)
			}
		}
		for _, g := range h.Client.Groups() {
			if !g.Joined || !want[h][g.Join.MGID] {
				return fmt.Sprintf("host %d: %v is joined %v, wanted %v", i, g.Join.MGID, g.Joined, want[h][g.Join.MGID])
			}
		}
	}
	return ""
}
