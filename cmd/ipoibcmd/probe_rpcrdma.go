package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"ipoibcm/control"
	"ipoibcm/ib"
	"ipoibcm/peerrpc"
	"ipoibcm/provider/softiwarp"
	"ipoibcm/provider/softroce"
	"ipoibcm/rdmacm"
	"ipoibcm/rpcrdma"
	"ipoibcm/rpcrdma/transport"
	"ipoibcm/verbs"
)

// The program that is called unless another is named: NFS (RFC 8267 section 7).
const (
	nfsProgram = 100003
	nfsVersion = 4
	nfsPort    = 20049
)

// rpcProbe is one run of "probe rpcrdma".
type rpcProbe struct {
	asJSON, versOnly bool
	carrier          string
	underlay         string
	program          string
	progVersion      uint32
	max              uint8
	sendSize         int
	recvSize         int
	count            int
	interval         time.Duration
	timeout          time.Duration
	pause            time.Duration

	host   string
	port   uint16
	local  netip.Addr
	remote netip.Addr
	out    control.RPCProbe
}

const rpcLong = `Connect to an RPC-over-RDMA server (RFC 8166), tell what both ends say in
their private data (RFC 8797), which version of the protocol is settled on (2 is
offered first), thresholds and credits, and call procedure 0 of a program.

Over RoCE the connection is set up by CM with the service ID that librdmacm makes
of PORT; over iWARP, by MPA over TCP. The port is 20049 unless given.

Exit status: 0 answered, 1 refused or failed, 2 used wrongly.`

func newProbeRPC() *cobra.Command {
	p := &rpcProbe{}
	cmd := &cobra.Command{
		Use:   "rpcrdma HOST[:PORT]",
		Short: "RPC-over-RDMA: private data, version, credits, NULL calls",
		Long:  rpcLong,
		Example: `  ipoibcmd probe rpcrdma 192.0.2.7
  ipoibcmd probe rpcrdma [fe80::1%eth0]:20049 --count 5 --json
  ipoibcmd probe rpcrdma 192.0.2.7 --transport iwarp --vers-only
  ipoibcmd probe rpcrdma 192.0.2.7:4755 --program ipoibcmd`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := p.parse(args[0], cmd.Flags().Changed("version")); err != nil {
				return usageError{hintError{err, "see: " + cmd.CommandPath() + " --help"}}
			}
			return p.run(cmd.Context())
		},
	}
	f := cmd.Flags()
	f.BoolVar(&p.asJSON, "json", false, "print JSON")
	f.StringVar(&p.carrier, "transport", "roce", "roce (CM and RC queue pairs) or iwarp (MPA over TCP)")
	f.StringVar(&p.underlay, "underlay", "", "network device to go by (default: as the routing table says)")
	f.StringVar(&p.program, "program", "nfs", "RPC program to call: a number, nfs, or ipoibcmd")
	f.Uint32Var(&p.progVersion, "version", nfsVersion, "its version")
	f.Uint8Var(&p.max, "rpcrdma", 2, "version of RPC-over-RDMA to offer first: 2 or 1")
	f.BoolVar(&p.versOnly, "vers-only", false, "end when the version is settled")
	f.IntVar(&p.sendSize, "send-size", 4096, "send size to announce in the private data, in octets")
	f.IntVar(&p.recvSize, "receive-size", 4096, "receive size to announce, in octets")
	f.IntVarP(&p.count, "count", "c", 3, "NULL calls to make, 1 to 1000")
	f.DurationVarP(&p.interval, "interval", "i", 0, "pause between them")
	f.DurationVar(&p.pause, "pause", 100*time.Millisecond,
		"iwarp: wait before the first message, because Linux's siw may overlook one that comes early")
	f.DurationVar(&p.timeout, "timeout", 10*time.Second, "bound on the connection's set-up, and on each call")
	return cmd
}

// parse looks at the arguments.
func (p *rpcProbe) parse(addr string, versionGiven bool) error {
	p.host, p.port = addr, nfsPort
	if host, port, err := net.SplitHostPort(addr); err == nil {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 {
			return fmt.Errorf("port %q: want 1 to 65535", port)
		}
		p.host, p.port = host, uint16(n)
	}
	switch p.program {
	case "nfs":
		p.out.Program = nfsProgram
	case "ipoibcmd":
		p.out.Program = peerrpc.Program
		if !versionGiven {
			p.progVersion = peerrpc.Version
		}
	default:
		n, err := strconv.ParseUint(p.program, 0, 32)
		if err != nil || n == 0 {
			return fmt.Errorf("--program %s: want a number, nfs or ipoibcmd", p.program)
		}
		p.out.Program = uint32(n)
	}
	_, err := rpcrdma.NewConn(p.options().RPC)
	return cmp.Or(
		errorIf(p.host == "", fmt.Errorf("%q is not HOST[:PORT]", addr)),
		errorIf(p.carrier != "roce" && p.carrier != "iwarp", fmt.Errorf("--transport %s: want roce or iwarp", p.carrier)),
		errorIf(p.max != 1 && p.max != 2, fmt.Errorf("--rpcrdma %d: want 1 or 2", p.max)),
		errorIf(p.count < 1 || p.count > 1000, fmt.Errorf("--count %d: want 1 to 1000", p.count)),
		errorIf(p.timeout <= 0 || p.interval < 0 || p.pause < 0,
			errors.New("--timeout must be above 0, --interval and --pause not below")),
		err,
	)
}

func (p *rpcProbe) options() transport.Options {
	// A peer may not answer at all in a version that is unknown to it. Then it has the other half of the
	// time to answer in version 1.
	return transport.Options{Pause: p.pause, RPC: rpcrdma.Options{
		Client: true, MaxVersion: rpcrdma.Version(p.max), SendSize: p.sendSize, RecvSize: p.recvSize,
		Program: p.out.Program, ProgVersion: p.progVersion, NegotiateTimeout: p.timeout / 2, CallTimeout: p.timeout,
	}}
}

func (p *rpcProbe) run(ctx context.Context) error {
	p.out.Version, p.out.Transport, p.out.Outcome = control.Version, p.carrier, "failed"
	p.out.Offered, p.out.ProgramVersion = int(p.max), p.progVersion
	p.out.NullMS, p.out.Counters = []float64{}, map[string]uint64{}
	p.out.Peer = net.JoinHostPort(p.host, strconv.Itoa(int(p.port)))
	err := p.ask(ctx)
	if err != nil {
		p.out.Error = err.Error()
		var hint hintError
		if errors.As(err, &hint) && !p.asJSON {
			p.out.Error += " (" + hint.hint + ")"
		}
	}
	refused := errorIf(p.out.Outcome != "answered", errors.New(p.out.Status))
	return told(p.asJSON, &p.out, printRPC, cmp.Or(err, refused))
}

// ask does everything on the network.
func (p *rpcProbe) ask(ctx context.Context) error {
	if err := p.resolve(ctx); err != nil {
		return err
	}
	connect, err := p.open()
	if err != nil {
		return err
	}
	dialCtx, cancel := context.WithTimeoutCause(ctx, p.timeout, fmt.Errorf("no connection within %v", p.timeout))
	defer cancel()
	start := time.Now()
	end, closeDev, err := connect(dialCtx)
	defer closeDev()
	if err != nil {
		return err
	}
	defer end.Close()
	p.out.SetupMS = ms(time.Since(start))
	defer func() { p.learn(end) }()
	p.learn(end)
	settle := time.NewTimer(p.timeout)
	defer settle.Stop()
	select {
	case <-end.Ready():
	case <-end.Done():
		return end.Err()
	case <-settle.C:
		return fmt.Errorf("connected, but no answer to a message of version %d within %v", p.max, p.timeout)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if p.versOnly {
		p.out.Outcome = "answered"
		return nil
	}
	for n := range p.count {
		if n > 0 && p.interval > 0 {
			select {
			case <-time.After(p.interval):
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		start := time.Now()
		r, err := end.Call(ctx,
			rpcrdma.Submit{Payload: (&rpcrdma.RPCCall{Prog: p.out.Program, Vers: p.progVersion}).Append(nil), MaxReply: 64})
		if err != nil {
			return err
		}
		p.out.NullMS = append(p.out.NullMS, ms(time.Since(start)))
		head, _, err := rpcrdma.ParseRPCReply(r.Payload)
		if err != nil {
			return fmt.Errorf("the reply is no RPC reply: %w", err)
		}
		p.out.Status = head.Status.String()
		if head.Status == rpcrdma.RPCProgMismatch || head.Status == rpcrdma.RPCMismatch {
			p.out.Status += fmt.Sprintf(": versions %d to %d", head.Low, head.High)
		}
		p.out.Outcome = "answered"
		if head.Status != rpcrdma.RPCSuccess {
			p.out.Outcome = "refused"
			break
		}
	}
	return nil
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// resolve finds the peer's address, and ours towards it.
func (p *rpcProbe) resolve(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	addr, err := netip.ParseAddr(p.host)
	if err != nil {
		all, err := net.DefaultResolver.LookupNetIP(ctx, "ip", p.host)
		if err != nil {
			return err
		}
		addr = all[0]
	}
	p.remote = addr.Unmap()
	if p.remote.IsLinkLocalUnicast() && p.remote.Zone() == "" && p.underlay != "" {
		p.remote = p.remote.WithZone(p.underlay)
	}
	// Nothing is sent: this only asks the routing table.
	d := net.Dialer{}
	c, err := d.DialContext(ctx, "udp", netip.AddrPortFrom(p.remote, p.port).String())
	if err != nil {
		return hintError{fmt.Errorf("no way to %v: %w", p.remote, err), "a link-local address needs its device: fe80::1%eth0"}
	}
	defer c.Close()
	p.local = c.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap()
	p.out.Local, p.out.Peer = p.local.String(), netip.AddrPortFrom(p.remote, p.port).String()
	if p.underlay == "" {
		p.underlay, err = deviceOf(p.local)
	}
	return err
}

// deviceOf returns the network device with an address.
func deviceOf(a netip.Addr) (string, error) {
	if a.Zone() != "" {
		return a.Zone(), nil
	}
	devices, err := net.Interfaces()
	if err != nil {
		return "", err
	}
	for _, d := range devices {
		addrs, _ := d.Addrs() // a device that has just gone has none
		if slices.ContainsFunc(addrs, func(at net.Addr) bool {
			prefix, err := netip.ParsePrefix(at.String())
			return err == nil && (prefix.Addr() == a || d.Flags&net.FlagLoopback != 0 && prefix.Contains(a))
		}) {
			return d.Name, nil
		}
	}
	return "", fmt.Errorf("no device has the address %v", a)
}

// open opens the device, and returns the function that connects. The second result of that function closes
// the device, and must be called after an error too.
func (p *rpcProbe) open() (func(context.Context) (*transport.End, func(), error), error) {
	if p.carrier == "iwarp" {
		dev, err := softiwarp.Open(softiwarp.Options{Addr: p.local.WithZone(""), Zone: p.local.Zone(), Port: -1})
		if err != nil {
			return nil, err
		}
		return func(ctx context.Context) (*transport.End, func(), error) {
			e, err := transport.DialIWARP(ctx, dev, func(ctx context.Context) (net.Conn, error) {
				return (&net.Dialer{}).DialContext(ctx, "tcp", netip.AddrPortFrom(p.remote, p.port).String())
			}, p.options())
			return e, func() { dev.Close() }, err
		}, nil
	}
	dev, err := softroce.Open(softroce.Options{Underlay: p.underlay, GID: ib.GID(p.local.WithZone("").As16())})
	if err != nil {
		return nil, hintError{err,
			"if a daemon on this host has the underlay's UDP port 4791: ask through it (ping --rdma), or use --transport iwarp"}
	}
	return func(ctx context.Context) (*transport.End, func(), error) {
		closeAll := func() { dev.Close() }
		port, err := rdmacm.Open(rdmacm.Options{Provider: dev})
		if err != nil {
			return nil, closeAll, err
		}
		closeAll = func() {
			port.Close()
			dev.Close()
		}
		opt := p.options()
		opt.Provider = verbs.Provider(dev)
		e, err := transport.DialRoCE(ctx, port, p.remote.WithZone(""), p.port, opt)
		return e, closeAll, err
	}, nil
}

// learn fills in the output from the state of the connection.
func (p *rpcProbe) learn(e *transport.End) {
	i := e.Info()
	o := &p.out
	own, at := rpcrdma.FindPrivateData(e.Private())
	o.Sent = privateOf(e.Private(), own, at)
	o.Received = privateOf(e.PeerPrivate(), i.Peer, i.PeerAt)
	o.Refused, o.SendInline, o.RecvInline, o.RemoteInv, o.Asked, o.Granted = int(i.Refused), i.SendInline, i.RecvInline,
		i.RemoteInv, i.Asked, i.Granted
	if i.Settled {
		o.Agreed = int(i.Version)
	}
	e.Counters(func(name string, v uint64) {
		if v > 0 {
			o.Counters[name] = v
		}
	})
}

func privateOf(b []byte, d rpcrdma.PrivateData, at int) *control.RPCPrivate {
	return &control.RPCPrivate{Hex: hex.EncodeToString(bytes.TrimRight(b, "\x00")), At: at, SendSize: d.SendSize,
		RecvSize: d.RecvSize, RemoteInv: d.RemoteInv}
}

func printRPC(w io.Writer, o *control.RPCProbe) {
	line := func(key, format string, args ...any) {
		fmt.Fprintf(w, "  %-16s %s\n", key, fmt.Sprintf(format, args...))
	}
	fmt.Fprintf(w, "%s from %s over %s\n", o.Peer, cmp.Or(o.Local, "nowhere"), o.Transport)
	for _, side := range []struct {
		name string
		p    *control.RPCPrivate
	}{{"private data", o.Sent}, {"of the peer", o.Received}} {
		switch {
		case side.p == nil:
		case side.p.At < 0:
			line(side.name, "none of RFC 8797: send size %d, receive size %d, no remote invalidation", side.p.SendSize,
				side.p.RecvSize)
		default:
			line(side.name, "send size %d, receive size %d, remote invalidation %s", side.p.SendSize, side.p.RecvSize,
				yesNo(side.p.RemoteInv))
		}
	}
	if o.Received != nil {
		line("connected", "in %.2f ms", o.SetupMS)
	}
	if o.Agreed != 0 {
		how := fmt.Sprintf("offered %d", o.Offered)
		if o.Refused != 0 {
			how += fmt.Sprintf(", the peer does not speak %d", o.Refused)
		}
		line("version", "%d (%s)", o.Agreed, how)
		line("inline", "%d octets to the peer, %d from it", o.SendInline, o.RecvInline)
		line("credits", "%d asked for, %d granted", o.Asked, o.Granted)
		line("invalidation", "replies may invalidate a handle: %s", yesNo(o.RemoteInv))
	}
	if len(o.NullMS) > 0 {
		line("program", "%d version %d: %s", o.Program, o.ProgramVersion, o.Status)
		sorted := slices.Sorted(slices.Values(o.NullMS))
		line("NULL", "%d calls, round trip min %.3f, median %.3f, max %.3f ms", len(sorted), sorted[0],
			sorted[len(sorted)/2], sorted[len(sorted)-1])
	}
	for _, name := range slices.Sorted(maps.Keys(o.Counters)) {
		line("counted", "%s %d", name, o.Counters[name])
	}
	fmt.Fprintln(w, cmp.Or(o.Error, o.Outcome))
}
