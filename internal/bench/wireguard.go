package main

import (
	"bufio"
	"context"
	"crypto/ecdh"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"ipoibcm/cmd/ipoibcmd/lab"
)

// wireguardVersion is the release of wireguard-go that is measured. It is built
// into .cache and is no dependency of ours.
const wireguardVersion = "v0.0.0-20260522210424-ecfc5a8d5446"

// wireguardPort is the UDP port of both ends.
const wireguardPort = 51820

// buildWireguard returns the wireguard-go program, built if it is not there yet.
func buildWireguard(ctx context.Context) (string, error) {
	dir, err := filepath.Abs(filepath.Join(".cache", "wireguard-go-"+wireguardVersion))
	if err != nil {
		return "", err
	}
	program := filepath.Join(dir, "wireguard")
	if _, err := os.Stat(program); err == nil {
		return program, nil
	}
	fmt.Fprintln(os.Stderr, "building wireguard-go", wireguardVersion)
	c := exec.CommandContext(ctx, "go", "install", "golang.zx2c4.com/wireguard@"+wireguardVersion)
	c.Env = append(os.Environ(), "GOBIN="+dir, "CGO_ENABLED=0")
	if out, err := c.CombinedOutput(); err != nil {
		text := strings.TrimSpace(string(out))
		return "", fmt.Errorf("it cannot be built: %s", text[strings.LastIndexByte(text, '\n')+1:])
	}
	return program, nil
}

// wireguard starts a wireguard-go on each host and makes them peers. The MTU is
// the underlay's less 80, which is what carries IPv6.
func (p *pair) wireguard(ctx context.Context, b *bench, at place) error {
	under, inner := underlays(at.family), inners(at.family)
	var keys [2]*ecdh.PrivateKey
	for i := range keys {
		var err error
		if keys[i], err = ecdh.X25519().GenerateKey(rand.Reader); err != nil {
			return err
		}
	}
	for i, h := range p.hosts {
		name := fmt.Sprintf("wgb%d", b.hosts-1+i) // its control socket is visible to all namespaces
		if err := p.startWireguard(b, h, name); err != nil {
			return err
		}
		err := configureWireguard(ctx, filepath.Join("/var/run/wireguard", name+".sock"), keys[i], wireguardPeer{keys[1-i].PublicKey(),
			netip.AddrPortFrom(addr(under[1-i]), wireguardPort), netip.PrefixFrom(addr(inner[1-i]), addr(inner[1-i]).BitLen())})
		if err != nil {
			return err
		}
		if err := errors.Join(h.SetMTU(name, at.mtu-80), h.AddAddr(name, inner[i]), h.Up(name)); err != nil {
			return err
		}
	}
	return nil
}

func (p *pair) startWireguard(b *bench, h *lab.Host, name string) error {
	log, err := os.Create(filepath.Join(b.dir, h.Name+".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	c := exec.Command(b.wireguard, "-f", name)
	c.Stdout, c.Stderr = log, log
	if err := h.Start(c); err != nil {
		return fmt.Errorf("start wireguard-go: %w", err)
	}
	p.onClose(func() {
		c.Process.Kill()
		c.Wait()
		os.Remove(filepath.Join("/var/run/wireguard", name+".sock"))
	})
	return nil
}

// A wireguardPeer is what one end is told about another.
type wireguardPeer struct {
	key      *ecdh.PublicKey
	endpoint netip.AddrPort
	allowed  netip.Prefix
}

// configureWireguard tells one end about the others, as wg(8) would.
func configureWireguard(ctx context.Context, socket string, own *ecdh.PrivateKey, peers ...wireguardPeer) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var conn net.Conn
	for {
		var err error
		if conn, err = new(net.Dialer).DialContext(ctx, "unix", socket); err == nil {
			break
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wireguard-go does not listen: %w", err)
		case <-time.After(5 * time.Millisecond):
		}
	}
	defer conn.Close()
	set := fmt.Sprintf("set=1\nprivate_key=%s\nlisten_port=%d\nreplace_peers=true\n", hex.EncodeToString(own.Bytes()), wireguardPort)
	for _, p := range peers {
		set += fmt.Sprintf("public_key=%s\nendpoint=%s\nallowed_ip=%s\n", hex.EncodeToString(p.key.Bytes()), p.endpoint, p.allowed)
	}
	if _, err := fmt.Fprint(conn, set+"\n"); err != nil {
		return err
	}
	answer, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil || answer != "errno=0\n" {
		return fmt.Errorf("wireguard-go refuses its configuration: %q (%v)", answer, err)
	}
	return nil
}
