package lab

import (
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/mdlayher/genetlink"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// ErrNoNFT says that the nft program is not installed.
var ErrNoNFT = errors.New("nft is not installed")

// Attributes of an ethtool request; x/sys names some of them only.
const (
	ethtoolHeader     = 1
	featuresWanted    = 3
	bitsetBits        = 3
	bitsetBit         = 1
	bitsetName        = 2
	nestedBit         = unix.NLA_F_NESTED
	ethtoolHeaderName = unix.ETHTOOL_A_HEADER_DEV_NAME
)

// OffloadsOff turns ethtool features of a device off, such as
// tx-udp-segmentation. Otherwise a rule that drops packets at the other end of the
// link sees several packets that the device did not segment as one.
func (h *Host) OffloadsOff(dev string, features ...string) error {
	return h.Do(func() error {
		c, err := genetlink.Dial(nil)
		if err != nil {
			return fmt.Errorf("generic netlink: %w", err)
		}
		defer c.Close()
		family, err := c.GetFamily(unix.ETHTOOL_GENL_NAME)
		if err != nil {
			return fmt.Errorf("ethtool: %w", err)
		}
		ae := netlink.NewAttributeEncoder()
		ae.Nested(ethtoolHeader|nestedBit, func(ae *netlink.AttributeEncoder) error {
			ae.String(ethtoolHeaderName, dev)
			return nil
		})
		ae.Nested(featuresWanted|nestedBit, func(ae *netlink.AttributeEncoder) error {
			ae.Nested(bitsetBits|nestedBit, func(ae *netlink.AttributeEncoder) error {
				for _, f := range features {
					// The kernel clears a bit that is named without a value.
					ae.Nested(bitsetBit|nestedBit, func(ae *netlink.AttributeEncoder) error {
						ae.String(bitsetName, f)
						return nil
					})
				}
				return nil
			})
			return nil
		})
		b, err := ae.Encode()
		if err != nil {
			return err
		}
		_, err = c.Execute(genetlink.Message{
			Header: genetlink.Header{Command: unix.ETHTOOL_MSG_FEATURES_SET, Version: unix.ETHTOOL_GENL_VERSION}, Data: b,
		}, family.ID, netlink.Request|netlink.Acknowledge)
		if err != nil {
			return fmt.Errorf("turn %s of %s in %s off: %w", strings.Join(features, ", "), dev, h.Name, err)
		}
		return nil
	})
}

// segmentation are the offloads that make several packets one.
var segmentation = []string{"tx-udp-segmentation", "tx-tcp-segmentation", "tx-tcp6-segmentation"}

// WholePackets turns off the offloads of a device that leave segmentation and checksums to others, so that
// every frame at the other end is one packet with a finished checksum.
func (h *Host) WholePackets(dev string) error {
	return h.OffloadsOff(dev, append(slices.Clone(segmentation), "tx-checksum-ip-generic")...)
}

// Ingress returns a script for [Host.NFT]: it adds a chain with rules for the packets that arrive on a device.
func Ingress(table, chain, dev string, priority int, rules string) string {
	return fmt.Sprintf("table netdev %s {\n chain %s {\n  type filter hook ingress device %q priority %d; "+
		"policy accept;\n%s }\n}\n", table, chain, dev, priority, rules)
}

// Lose makes a device drop one in n of the RoCEv2 packets that arrive, at random.
// First it turns off the offloads of devFrom that would make the device see several
// packets as one. from is the host at the other end of the link, devFrom its device.
func (h *Host) Lose(dev string, from *Host, devFrom string, n int) error {
	if err := from.OffloadsOff(devFrom, segmentation...); err != nil {
		return err
	}
	return h.NFT(Ingress("ipoibcm", "loss", dev, 0,
		fmt.Sprintf("  udp dport 4791 numgen random mod %d == 0 counter drop\n", n)))
}

// Swallow makes a device drop the RoCEv2 packets of more than mtu octets that arrive. It
// sends no ICMP message, like a router with a smaller MTU whose ICMP messages are
// filtered. from is the host at the other end of the link, devFrom its device.
func (h *Host) Swallow(dev string, from *Host, devFrom string, mtu int) error {
	if err := from.OffloadsOff(devFrom, segmentation...); err != nil {
		return err
	}
	const header = 40 // of IPv6, which its length does not count
	rules := fmt.Sprintf("  udp dport 4791 ip6 length > %d counter drop\n  udp dport 4791 ip length > %d "+
		"counter drop\n", mtu-header, mtu)
	return h.NFT(Ingress("ipoibcm_swallow", "swallow", dev, 0, rules))
}

// Mark makes a device change the ECN codepoint of RoCEv2 packets: of those that arrive
// with the codepoint from, every n-th gets the codepoint to. Both are named as in nft(8).
// IPv4 and IPv6 are counted apart. Each call replaces the rules of the one before, for
// another device of h too.
func (h *Host) Mark(dev, from, to string, n int) error {
	rules := ""
	for _, family := range []string{"ip", "ip6"} {
		rules += fmt.Sprintf("  %s ecn %s udp dport 4791 numgen inc mod %d == 0 counter %s ecn set %s\n", family,
			from, n, family, to)
	}
	return h.NFT("table netdev ipoibcm_mark {}\ndelete table netdev ipoibcm_mark\n" +
		Ingress("ipoibcm_mark", "marks", dev, 0, rules))
}

// Block makes a device drop every RoCEv2 packet that arrives, until Unblock.
func (h *Host) Block(dev string) error {
	return h.NFT(Ingress("ipoibcm_block", "block", dev, -1, "  udp dport 4791 counter drop\n"))
}

// Unblock ends Block.
func (h *Host) Unblock() error { return h.NFT("delete table netdev ipoibcm_block\n") }

// NFT runs the program nft with a script inside the namespace.
func (h *Host) NFT(script string) error {
	nft, err := exec.LookPath("nft")
	if err != nil {
		return ErrNoNFT
	}
	c := exec.Command(nft, "-f", "-")
	c.Stdin = strings.NewReader(script)
	if out, err := h.Output(c); err != nil {
		return fmt.Errorf("nft in %s: %w: %s", h.Name, err, out)
	}
	return nil
}

var nftPackets = regexp.MustCompile(`counter packets (\d+)`)

// Lost returns how many packets Lose has dropped.
func (h *Host) Lost() (int, error) {
	out, err := h.Output(exec.Command("nft", "list", "table", "netdev", "ipoibcm"))
	if err != nil {
		return 0, fmt.Errorf("packets dropped in %s: %w: %s", h.Name, err, out)
	}
	m := nftPackets.FindSubmatch(out)
	if m == nil {
		return 0, fmt.Errorf("packets dropped in %s: no counter in %q", h.Name, out)
	}
	return strconv.Atoi(string(m[1]))
}

// Output runs a command inside the namespace and returns what it printed to standard
// output and standard error together, except what the caller directs elsewhere with
// c.Stdout or c.Stderr.
func (h *Host) Output(c *exec.Cmd) ([]byte, error) {
	var out strings.Builder
	if c.Stdout == nil {
		c.Stdout = &out
	}
	if c.Stderr == nil {
		c.Stderr = &out
	}
	if err := h.Start(c); err != nil {
		return nil, err
	}
	err := c.Wait()
	return []byte(out.String()), err
}
