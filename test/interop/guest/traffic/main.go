// Command traffic makes IP traffic in the guest or namespace where it runs, and checks
// what comes back. Both ends of a product test use it.
//
//	traffic ping ADDR SIZE...         one echo of an IP packet of each SIZE octets
//	traffic listen ADDR:PORT          print "ready", then octets and SHA-256 of one TCP connection
//	traffic send ADDR:PORT OCTETS     print octets and SHA-256 of what was sent, then how long it took
//	traffic exchange ADDR:PORT SIZE   one UDP datagram of SIZE octets there and back
//	traffic echo ADDR:PORT            print "ready", then send UDP datagrams back for ever
//	traffic hear ADDR:PORT DEVICE     print "ready", then the length of one datagram to the address, which may be
//	                                  a group that is joined on the device, or a broadcast address
//	traffic say ADDR:PORT SIZE DEVICE one UDP datagram there every tenth of a second, until it is killed
//	traffic sink ADDR:PORT            print "ready", then how many octets of UDP came until there was silence
//	traffic flood ADDR:PORT SIZE RATE UDP datagrams of SIZE octets, RATE Mb/s, for 3 s; print the octets sent
//	traffic get SOCKET PATH           print a document of an agent's control API
//	traffic outside DEVICE            print "ready", then one line of what was received there when the input
//	                                  ends: packets of RoCEv2, and all packets
//	traffic wireguard DEVICE N        set up a WireGuard device: host N of two, fd77::N inside, fd78::N outside
package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"time"

	"ipoibcm/internal/lab"
)

// patience bounds each step: a guest is slow, and a connection may have to come up.
const patience = 20 * time.Second

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "traffic:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) < 2 {
		return errors.New("not enough arguments")
	}
	n := 0
	if len(args) > 2 && args[0] != "hear" && args[0] != "get" {
		var err error
		if n, err = strconv.Atoi(args[2]); err != nil {
			return err
		}
	}
	do := commands[args[0]]
	if do == nil {
		return fmt.Errorf("no such command: %s", args[0])
	}
	return do(args[1], n, args[2:])
}

// commands take the first argument, the second as a number (0 if it is none), and all but the first.
var commands = map[string]func(first string, n int, more []string) error{
	"ping":      func(addr string, _ int, sizes []string) error { return ping(addr, sizes) },
	"listen":    func(addr string, _ int, _ []string) error { return listen(addr) },
	"send":      func(addr string, n int, _ []string) error { return send(addr, n) },
	"echo":      func(addr string, _ int, _ []string) error { return echo(addr) },
	"hear":      func(addr string, _ int, more []string) error { return hear(addr, more[0]) },
	"say":       func(addr string, n int, more []string) error { return say(addr, n, more[1]) },
	"sink":      func(addr string, _ int, _ []string) error { return sink(addr) },
	"flood":     func(addr string, n int, more []string) error { return flood(addr, n, more[1]) },
	"get":       func(socket string, _ int, more []string) error { return get(socket, more[0]) },
	"outside":   func(device string, _ int, _ []string) error { return outside(device) },
	"wireguard": func(device string, n int, _ []string) error { return tunnel(device, n) },
	"exchange":  func(addr string, n int, _ []string) error { return exchange(addr, n) },
}

func ping(addr string, sizes []string) error {
	dst, err := netip.ParseAddr(addr)
	if err != nil {
		return err
	}
	for _, size := range sizes {
		n, err := strconv.Atoi(size)
		if err != nil {
			return err
		}
		rtt, err := lab.Echo(lab.Ping{Dst: dst, Size: n, Timeout: time.Second})
		if err != nil {
			return err
		}
		fmt.Println(rtt)
	}
	return nil
}

func listen(addr string) error {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	c, err := l.Accept()
	if err != nil {
		return err
	}
	defer c.Close()
	h := sha256.New()
	n, err := io.Copy(h, c)
	fmt.Printf("%d %x\n", n, h.Sum(nil))
	return err
}

func send(addr string, n int) error {
	c, err := net.DialTimeout("tcp", addr, patience)
	if err != nil {
		return err
	}
	defer c.Close()
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{byte(n)}).Read(b)
	start := time.Now()
	if _, err := c.Write(b); err != nil {
		return err
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		return err
	}
	// The other end closes the connection when it has all data.
	c.SetReadDeadline(time.Now().Add(3 * patience))
	if _, err := io.Copy(io.Discard, c); err != nil {
		return err
	}
	took := time.Since(start)
	fmt.Printf("%d %x\n%v\n", n, sha256.Sum256(b), took)
	return nil
}

func echo(addr string) error {
	c, err := net.ListenPacket("udp", addr)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	buf := make([]byte, 1<<16)
	for {
		n, from, err := c.ReadFrom(buf)
		if err != nil {
			return err
		}
		c.WriteTo(buf[:n], from)
	}
}

func exchange(addr string, n int) error {
	c, err := net.Dial("udp", addr)
	if err != nil {
		return err
	}
	defer c.Close()
	b, back := make([]byte, n), make([]byte, 1<<16)
	rand.NewChaCha8([32]byte{byte(n)}).Read(b)
	for end := time.Now().Add(patience); time.Now().Before(end); { // datagrams may be lost
		if _, err := c.Write(b); err != nil {
			return err
		}
		c.SetReadDeadline(time.Now().Add(patience / 10))
		k, err := c.Read(back)
		switch {
		case err != nil:
		case string(back[:k]) != string(b):
			return fmt.Errorf("a datagram of %d octets came back as another of %d", n, k)
		default:
			return nil
		}
	}
	return fmt.Errorf("no datagram of %d octets came back", n)
}

func get(socket, path string) error {
	c := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}}
	r, err := c.Get("http://agent" + path)
	if err != nil {
		return err
	}
	defer r.Body.Close()
	if r.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", path, r.Status)
	}
	_, err = io.Copy(os.Stdout, r.Body)
	return err
}
