package draw

import (
	"cmp"
	"fmt"
	"strings"
	"time"
)

// A figure is one row of the table in README: the ratio of RC to another contender, or to RC in another
// variant.
type figure struct {
	text          string
	test, variant string
	of            string // the other contender
	than          string // variant of that contender; empty means the same variant
}

// figures are the rows with ratios: first those where RC is ahead, with one for what loss costs, and from
// "behind" on those where RC is behind.
var figures = []figure{
	{"one TCP stream: goodput, of wireguard-go's", "tcp", "1 stream", "wireguard-go", ""},
	{"its processor time for each GB, of wireguard-go's", "cpu", "1 stream", "wireguard-go", ""},
	{"64 octets there and back: time, of wireguard-go's", "latency", "64 octets, p50", "wireguard-go", ""},
	{"1 of 1000 packets lost: goodput, of wireguard-go's", "loss", "0.1%", "wireguard-go", ""},
	{"the same, of our own without loss", "loss", "0.1%", "RC", "no loss"},
	{"**behind**: one TCP stream: goodput, of the plain underlay's", "tcp", "1 stream", "raw veth", ""},
	{"the same, of VXLAN's (in the kernel)", "tcp", "1 stream", "VXLAN", ""},
	{"64 octets every 20 ms: time, of VXLAN's", "latency", "64 octets every 20 ms, p50", "VXLAN", ""},
}

// FiguresTable returns a report's figures for README, as Markdown. It has a dash for what was not measured.
func FiguresTable(r Report) string {
	var b strings.Builder
	fmt.Fprintf(&b, "| RC, over IPv6 (median of %d rounds, %s) | underlay 9000 | underlay 1500 |\n"+
		"| --- | --- | --- |\n", r.Rounds, r.Started.Format(time.DateOnly))
	for _, f := range figures {
		b.WriteString("| " + f.text + " |")
		for _, mtu := range []int{9000, 1500} {
			cell := "–"
			if ratio, ok := Ratio(r.find(f.test, f.variant, mtu, "RC"),
				r.find(f.test, cmp.Or(f.than, f.variant), mtu, f.of)); ok {
				cell = significant(ratio)
			}
			fmt.Fprintf(&b, " %s |", cell)
		}
		b.WriteString("\n")
	}
	for _, one := range []struct{ text, test, variant string }{
		{"connection up after the first packet", "setup", "first packet to established, p50"},
		{"connections set up on one core", "setup", "connections per second, one core"},
		{"memory of an idle connection", "memory", "per idle connection"},
	} {
		cell := "–"
		if s := r.find(one.test, one.variant, 9000, "RC"); s != nil {
			cell = significant(s.Median) + " " + s.Unit
		}
		fmt.Fprintf(&b, "| %s | %s | |\n", one.text, cell)
	}
	return b.String()
}
