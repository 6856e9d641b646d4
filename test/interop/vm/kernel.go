package vm

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// modules are the modules that guests may load. The modules that these need are copied too.
var modules = []string{
	"virtio_net", "virtio_pci", "virtio_console", "virtio_rng",
	"ib_core", "ib_uverbs", "ib_umad", "ib_cm", "rdma_cm", "rdma_ucm", "rdma_rxe",
	"ib_ipoib", "crc32_generic", "crc32_pclmul", "crc32c_generic", "tun", "veth", "nf_tables",
	"rpcrdma", "nfsd", "vrf",
	"wireguard", "xfrm_user", "esp6", "macsec", "gcm", "ghash_generic", "ctr", "seqiv", "drbg", "hmac", "sha512_generic",
	"jitterentropy_rng", "button",
}

// A kernel is Debian's kernel package, unpacked.
type kernel struct {
	version string // "6.1.0-56-amd64"
	dir     string // of the package's files
}

// findKernel asks apt for the package of the newest kernel of a series, such as "6.12".
// The empty series means that of this release of Debian. from has the options for
// fetching the package.
func findKernel(ctx context.Context, series, cache string) (pkg string, from apt, err error) {
	if series != "" {
		if pkg, err = from.dependency(ctx, "linux-image-"+series+"-amd64"); err == nil {
			return pkg, from, nil
		}
	}
	pkg, err = from.dependency(ctx, "linux-image-amd64")
	if err != nil || series == "" || strings.HasPrefix(pkg, "linux-image-"+series+".") {
		return pkg, from, err
	}
	release := releases[series]
	if release == "" {
		return "", nil, fmt.Errorf("apt knows no kernel %s", series)
	}
	if from, err = otherRelease(ctx, release, cache); err != nil {
		return "", nil, &UnreachableError{release, series, err}
	}
	pkg, err = from.dependency(ctx, "linux-image-amd64")
	return pkg, from, err
}

// vmlinux writes the ELF kernel from the compressed image to file. Otherwise the guest
// would unpack it, which costs seconds in emulation.
func (k *kernel) vmlinux(ctx context.Context, file string) error {
	image, err := os.ReadFile(filepath.Join(k.dir, "boot", "vmlinuz-"+k.version))
	if err != nil {
		return err
	}
	for _, f := range []struct {
		magic, program string
		args           []string
	}{
		{"\xfd7zXZ\x00", "xz", []string{"-dc", "--single-stream"}},
		{"\x28\xb5\x2f\xfd", "zstd", []string{"-dcq"}}, // fails behind the kernel, after writing all of it
	} {
		for at := 0; ; at++ {
			n := bytes.Index(image[at:], []byte(f.magic))
			if n < 0 {
				break
			}
			at += n
			c := exec.CommandContext(ctx, f.program, f.args...)
			c.Stdin = bytes.NewReader(image[at:])
			out, _ := c.Output()
			if bytes.HasPrefix(out, []byte("\x7fELF")) {
				return os.WriteFile(file, out, 0o644)
			}
		}
	}
	return fmt.Errorf("no kernel found inside vmlinuz-%s", k.version)
}

// copyModules copies the modules, and those that they need, into the root file system.
func (k *kernel) copyModules(ctx context.Context, root string) error {
	lib := filepath.Join("lib/modules", k.version)
	dep, err := os.ReadFile(filepath.Join(k.dir, lib, "modules.dep"))
	if err != nil {
		return err
	}
	needs, byName := map[string][]string{}, map[string]string{}
	for _, l := range strings.Split(string(dep), "\n") {
		path, rest, _ := strings.Cut(l, ":")
		needs[path] = strings.Fields(rest)
		name, _, _ := strings.Cut(filepath.Base(path), ".ko")
		byName[strings.ReplaceAll(name, "-", "_")] = path
	}
	done := map[string]bool{}
	for _, m := range modules {
		path := byName[m]
		if path == "" {
			continue // built in, or not in this kernel: loading it will tell
		}
		for _, p := range append(needs[path], path) {
			if done[p] {
				continue
			}
			done[p] = true
			if err := k.copyModule(ctx, filepath.Join(k.dir, lib, p), filepath.Join(root, lib, p)); err != nil {
				return err
			}
		}
	}
	for _, f := range []string{"modules.builtin", "modules.order", "modules.builtin.modinfo"} {
		if b, err := os.ReadFile(filepath.Join(k.dir, lib, f)); err == nil {
			if err := os.WriteFile(filepath.Join(root, lib, f), b, 0o644); err != nil {
				return err
			}
		}
	}
	_, err = output(ctx, "", "depmod", "-b", root, k.version)
	return err
}

func (k *kernel) copyModule(ctx context.Context, from, to string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	if packed, ok := strings.CutSuffix(to, ".xz"); ok {
		c := exec.CommandContext(ctx, "xz", "-dc")
		c.Stdin = bytes.NewReader(b)
		if b, err = c.Output(); err != nil {
			return fmt.Errorf("unpack %s: %w", from, err)
		}
		to = packed
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	return os.WriteFile(to, b, 0o644)
}

// output runs a program in dir and returns what it printed.
func output(ctx context.Context, dir, name string, args ...string) (string, error) {
	c := exec.CommandContext(ctx, name, args...)
	c.Dir = dir
	c.Env = append(os.Environ(), "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive")
	var stderr bytes.Buffer
	c.Stderr = &stderr
	out, err := c.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, bytes.TrimSpace(stderr.Bytes()))
	}
	return string(out), nil
}
