package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"strconv"

	"ipoibcm/internal/lab"
)

// losses are the rates at which the underlay loses packets: one packet in that many
// is lost; 0 means none.
var losses = []int{0, 10000, 1000, 100}

// lossName is the variant of a [Key].
func lossName(oneIn int) string {
	if oneIn == 0 {
		return "no loss"
	}
	return strconv.FormatFloat(100/float64(oneIn), 'f', -1, 64) + "%"
}

// lossTargets returns the target of each place where loss was measured. If it was measured nowhere,
// lossTargets returns that of one place, whose verdict is "not measured".
func lossTargets(r *Report) (list []target) {
	lossy := r.places(testLoss)
	if len(lossy) == 0 {
		lossy = []place{{9000, family6}}
	}
	for _, p := range lossy {
		list = append(list, target{name: fmt.Sprintf("RC at 0.1%% loss of RC without, %v", p),
			num: p.key(testLoss, lossName(1000), oursRC), den: p.key(testLoss, lossName(0), oursRC), bound: 0.5})
	}
	return list
}

// wireFeatures are offloads that combine several packets of the wire into one.
var wireFeatures = []string{"tx-udp-segmentation", "tx-tcp-segmentation", "tx-tcp6-segmentation",
	"tx-tcp-ecn-segmentation", "tx-tcp-mangleid-segmentation", "tx-udp_tnl-segmentation", "tx-udp_tnl-csum-segmentation"}

// singly makes the veth pair carry every packet of the wire by itself, so that a
// rule at the receiver's ingress counts and drops packets and not batches.
func (m *mesh) singly() error {
	for _, h := range m.hosts {
		if err := h.OffloadsOff("eth0", wireFeatures...); err != nil {
			return err
		}
	}
	return nil
}

// lose makes both ends count the TCP and UDP packets that arrive, and drop one in oneIn
// of them at random. Zero drops none.
func (m *mesh) lose(oneIn int) error {
	drop := ""
	if oneIn > 0 {
		drop = fmt.Sprintf("  meta l4proto { tcp, udp } numgen random mod %d == 0 counter drop comment \"lost\"\n", oneIn)
	}
	for _, h := range m.hosts {
		if err := h.NFT("table netdev ipoibcm_bench {}\ndelete table netdev ipoibcm_bench\n" +
			lab.Ingress("ipoibcm_bench", "loss", "eth0", 0,
				"  meta l4proto { tcp, udp } counter comment \"came\"\n"+drop)); err != nil {
			return err
		}
	}
	return nil
}

var nftCounter = regexp.MustCompile(`counter packets (\d+) bytes (\d+) (drop )?comment "(came|lost)"`)

// lost returns how many packets have arrived at both ends since the call of lose, how many
// of them were dropped, and how many octets all of them had.
func (m *mesh) lost() (came, lost int, octets int64, err error) {
	for _, h := range m.hosts {
		out, err := h.Output(exec.Command("nft", "list", "table", "netdev", "ipoibcm_bench"))
		if err != nil {
			return 0, 0, 0, fmt.Errorf("nft in %s: %w: %s", h.Name, err, out)
		}
		c, l, o := countLoss(string(out))
		came, lost, octets = came+c, lost+l, octets+o
	}
	return came, lost, octets, nil
}

func countLoss(out string) (came, lost int, octets int64) {
	for _, m := range nftCounter.FindAllStringSubmatch(out, -1) {
		n, _ := strconv.Atoi(m[1])
		size, _ := strconv.ParseInt(m[2], 10, 64)
		if m[4] == "lost" {
			lost += n
			continue
		}
		came += n
		octets += size
	}
	return came, lost, octets
}

// checkLoss returns an error if the counts show that the rules did not work: no packet
// passed them, or the packets had more than mtu octets on average and were therefore
// batches, or none was dropped of more than 10*rate packets. rate is lose's oneIn.
func checkLoss(came, lost int, octets int64, mtu, rate int) error {
	switch {
	case came == 0:
		return errors.New("no packet passed the rules")
	case octets/int64(came) > int64(mtu):
		return fmt.Errorf("packets of %d octets on average passed the rules: they do not see what the wire does",
			octets/int64(came))
	case rate > 0 && lost == 0 && came > 10*rate:
		return fmt.Errorf("of %d packets none was lost: the rules do not work", came)
	}
	return nil
}

// loss measures goodput while packets are lost.
func (b *bench) loss(ctx context.Context, at place, rates []int, names []string) error {
	list, stop := b.pairs(ctx, at, names)
	defer stop()
	for _, m := range list {
		if err := m.singly(); err != nil {
			return err
		}
	}
	for round := range b.rounds {
		for _, rate := range rates {
			for _, m := range list {
				if err := m.lose(rate); err != nil {
					return err
				}
			}
			goodput := map[*mesh]float64{}
			list = b.measureEach(ctx, list, round, lossName(rate)+", ", func(m *mesh) error {
				t, err := b.runLoad(ctx, m, load{streams: 1})
				goodput[m] = t.mbps()
				return err
			})
			for _, m := range list {
				came, lost, octets, err := m.lost()
				if err != nil {
					return err
				}
				if err := checkLoss(came, lost, octets, at.mtu, rate); err != nil {
					return err
				}
				b.r.add(m.key(testLoss, lossName(rate)), "Mb/s", goodput[m])
			}
		}
	}
	return ctx.Err()
}
