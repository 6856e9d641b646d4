package draw

// A Box is one part of the data path. Name is the name of a package of ours or of a type in
// one. It is empty for a part that is not ours.
type Box struct {
	X, Y, W, H float64
	Name       string
	Title      string // used if Name is empty
	Lines      []string
	Pure       bool // it is a machine without effects of its own
}

// dataWidth is the width of the picture of the data path.
const dataWidth = 900

// DataPath are the parts of one host, and the other host.
var DataPath = []Box{
	{X: 24, Y: 56, W: 440, H: 44, Title: "Linux: sockets, TCP, IP",
		Lines: []string{"routes with the MTU of each connection"}},
	{X: 24, Y: 130, W: 440, H: 46, Name: "tun.Device",
		Lines: []string{"the interface; GSO packets split and merged, checksums"}},
	{X: 24, Y: 206, W: 440, H: 62, Name: "datapath.Loop",
		Lines: []string{"looks up the next hop, adds the 4-octet header of IPoIB,",
			"posts messages to the queue pair of the connection"}},
	{X: 24, Y: 298, W: 284, H: 46, Name: "fqcodel.Scheduler", Lines: []string{"a queue in front of each slow peer"}},
	{X: 24, Y: 374, W: 440, H: 62, Name: "provider/softroce/engine.QP",
		Lines: []string{"RC, UC and UD: messages to packets and back,", "acknowledgements, what is sent again"}},
	{X: 24, Y: 466, W: 440, H: 46, Name: "provider/softroce.Device",
		Lines: []string{"RoCEv2 in UDP sockets, port 4791, ICRC"}},

	{X: 560, Y: 130, W: 316, H: 46, Name: "fib.Table", Pure: true,
		Lines: []string{"next hops as the kernel answers them"}},
	{X: 560, Y: 206, W: 316, H: 62, Name: "ipoib.Interface", Pure: true,
		Lines: []string{"which queue pair and which MTU", "for this next hop"}},
	{X: 560, Y: 298, W: 150, H: 46, Name: "neigh.Table", Pure: true, Lines: []string{"ARP, ND, DAD"}},
	{X: 726, Y: 298, W: 150, H: 46, Name: "cm.Manager", Pure: true, Lines: []string{"REQ to TIMEWAIT"}},
	{X: 560, Y: 374, W: 150, H: 46, Name: "mtu.Budget", Pure: true, Lines: []string{"UC receive rings"}},
	{X: 726, Y: 374, W: 150, H: 46, Name: "group.Machine", Pure: true, Lines: []string{"multicast groups"}},
	{X: 560, Y: 466, W: 316, H: 46, Title: "the other host", Lines: []string{"the same, from the bottom up"}},
}

// DataPathSVG draws the data path.
func DataPathSVG() string {
	p := New(dataWidth, "The way of a packet",
		"Down the left side, packets of an application go through Linux, the TUN device, the event loop of package datapath,"+
			" a queue, a queue pair of the RoCEv2 engine and a UDP socket, over any Ethernet to the other host. On the right,"+
			" the machine of the interface decides: it gets first packets, ARP, ND and CM messages, and fills the table that"+
			" the event loop looks next hops up in.")
	p.Text(24, 32, "title", "The way of a packet")
	p.Text(560, 112, "small faint", "decides; driven by package agent, on one goroutine")
	for _, b := range DataPath {
		p.box(b)
	}
	for _, y := range []float64{100, 176, 268, 344, 436} {
		p.Arrow(160, y+3, 160, y+27, blue)
	}
	for _, y := range []float64{100, 176, 436} {
		p.Arrow(380, y+27, 380, y+3, teal)
	}
	p.Arrow(380, 371, 380, 271, teal)
	p.Text(150, 120, "small end", "out")
	p.Text(390, 120, "small", "in")
	p.Arrow(467, 224, 557, 224, ink)
	p.Text(512, 218, "small middle", "first packets")
	p.Text(512, 239, "small middle", "ARP, ND, CM")
	p.Arrow(557, 254, 467, 254, ink)
	p.Text(512, 269, "small middle", "table")
	for _, x := range []float64{635, 801} {
		p.Arrow(x, 271, x, 295, ink)
	}
	for _, x := range []float64{715, 721} {
		p.Line(x, 268, x, 386, 1.5, ink)
	}
	p.Line(715, 386, 710, 386, 1.5, ink)
	p.Line(721, 386, 726, 386, 1.5, ink)
	p.Arrow(718, 203, 718, 179, ink)
	p.Arrow(467, 483, 557, 483, blue)
	p.Arrow(557, 497, 467, 497, teal)
	p.Text(512, 475, "small middle", "Ethernet")
	p.Text(24, 540, "small faint", "Green: pure packages, without goroutine, clock or socket. "+
		"With provider/ibverbs an adapter or the kernel stands for the two lowest boxes.")
	return p.SVG(556)
}

// box draws one part.
func (p *Picture) box(b Box) {
	fill, stroke, class := "#eef4fb", blue, "bold mono"
	title := b.Name
	switch {
	case b.Name == "":
		fill, stroke, class, title = "#f3f4f6", faint, "bold", b.Title
	case b.Pure:
		fill, stroke = "#e6f4f1", teal
	}
	p.Rect(b.X, b.Y, b.W, b.H, 5, fill, stroke)
	p.Text(b.X+12, b.Y+19, class, title)
	for i, l := range b.Lines {
		p.Text(b.X+12, b.Y+36+16*float64(i), "small", l)
	}
}
