package ibverbs

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/Mellanox/rdmamap"
)

// findDevice returns the name of the RDMA device of a network device. rdmamap finds most. The GIDs
// of a VLAN are in the table of the RDMA device below the VLAN, and deviceByGIDs finds that device.
func findDevice(netdev string) (string, error) {
	if name, err := rdmamap.GetRdmaDeviceForNetdevice(netdev); err == nil && name != "" {
		return name, nil
	}
	if name := deviceByGIDs(classRDMA, netdev); name != "" {
		return name, nil
	}
	have := rdmamap.GetRdmaDeviceList()
	if len(have) == 0 {
		return "", fmt.Errorf("%w %s: this host has none (rdma link add rxe0 type rxe netdev %s makes one)", ErrNoDevice,
			netdev, netdev)
	}
	return "", fmt.Errorf("%w %s: there are %s (rdma link add rxe1 type rxe netdev %s makes one)", ErrNoDevice, netdev,
		strings.Join(have, ", "), netdev)
}

// NetworkDevice returns the network device of an RDMA device, "" if it has none.
func NetworkDevice(device string) string { return netdevOf(classRDMA, device) }

func netdevOf(class, device string) string {
	for _, f := range sorted(class, device, "ports/*/gid_attrs/ndevs/*") {
		if name := lineOf(f); name != "" {
			return name
		}
	}
	return ""
}

// deviceByGIDs returns the RDMA device that has a GID of a network device, "" if none has.
func deviceByGIDs(class, netdev string) string {
	for _, f := range sorted(class, "*/ports/*/gid_attrs/ndevs/*") {
		if lineOf(f) == netdev {
			rel, _ := filepath.Rel(class, f)
			name, _, _ := strings.Cut(rel, "/")
			return name
		}
	}
	return ""
}

// findUMAD returns the device node for the MADs of an RDMA device's port.
func findUMAD(class, device string, port int) (string, error) {
	for _, d := range sorted(class, "umad*") {
		if lineOf(filepath.Join(d, "ibdev")) == device && lineOf(filepath.Join(d, "port")) == fmt.Sprint(port) {
			return filepath.Join("/dev/infiniband", filepath.Base(d)), nil
		}
	}
	return "", fmt.Errorf("no umad node for %s port %d: modprobe ib_umad", device, port)
}

// sorted returns the paths that match the elements of a pattern.
func sorted(pattern ...string) []string {
	paths, _ := filepath.Glob(filepath.Join(pattern...))
	slices.Sort(paths)
	return paths
}

func lineOf(path string) string {
	b, _ := os.ReadFile(path)
	return strings.TrimSpace(string(b))
}
