//go:build linux

package rig

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"time"
)

const sshdReady = 10 * time.Second

// SSHD is an OpenSSH server of our own on loopback: the peer of everything that goes through ssh.
type SSHD struct {
	*Process
	Path    Path
	dir     string
	address string
	block   string // of Path.Config, for configurations made from it
}

// StartSSHD starts an OpenSSH server with keys and configuration in dir; files behind it are put into data.
func StartSSHD(ctx context.Context, dir, data string) (*SSHD, error) {
	program, err := sshdProgram()
	if err != nil {
		return nil, err
	}
	for _, d := range []string{dir, data} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, err
		}
	}
	for _, key := range []string{"host", "user"} {
		argv := []string{"ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", filepath.Join(dir, key)}
		if _, _, err := (Run{}).Do(ctx, argv); err != nil {
			return nil, err
		}
	}
	port, err := FreePort()
	if err != nil {
		return nil, err
	}
	config := filepath.Join(dir, "sshd_config")
	if err := os.WriteFile(config, []byte(sshdConfig(dir, port)), 0o600); err != nil {
		return nil, err
	}
	if os.Geteuid() == 0 { // where privilege separation looks for its empty directory
		if err := os.MkdirAll("/run/sshd", 0o755); err != nil {
			return nil, err
		}
	}
	s := &SSHD{dir: dir, address: net.JoinHostPort("127.0.0.1", strconv.Itoa(port))}
	if s.Process, err = Start("sshd", filepath.Join(dir, "sshd.log"), nil, program, "-D", "-e", "-f", config); err != nil {
		return nil, err
	}
	if err := s.WaitTCP(ctx, s.address, sshdReady); err != nil {
		_ = s.Stop()
		return nil, err
	}
	if err := s.writeClient(port, data); err != nil {
		_ = s.Stop()
		return nil, err
	}
	return s, nil
}

func sshdProgram() (string, error) {
	if path, err := exec.LookPath("sshd"); err == nil {
		return filepath.Abs(path) // sshd wants to be called by its whole path
	}
	if _, err := os.Stat("/usr/sbin/sshd"); err == nil {
		return "/usr/sbin/sshd", nil
	}
	return "", fmt.Errorf("no sshd on this machine, which is what Carrel is compared with: apt-get install openssh-server")
}

func sshdConfig(dir string, port int) string {
	sftp := "internal-sftp"
	if _, err := os.Stat("/usr/lib/openssh/sftp-server"); err == nil {
		sftp = "/usr/lib/openssh/sftp-server" // what Debian's own configuration says
	}
	return fmt.Sprintf(`ListenAddress 127.0.0.1
Port %d
HostKey %s/host
AuthorizedKeysFile %s/user.pub
PidFile none
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PrintMotd no
UseDNS no
MaxStartups 1000
MaxSessions 1000
Ciphers %s
Subsystem sftp %s
`, port, dir, dir, Cipher, sftp)
}

func (s *SSHD) writeClient(port int, data string) error {
	who, err := user.Current()
	if err != nil {
		return err
	}
	key, err := os.ReadFile(filepath.Join(s.dir, "host.pub"))
	if err != nil {
		return err
	}
	known := filepath.Join(s.dir, "known_hosts")
	if err := os.WriteFile(known, append([]byte("direct "), key...), 0o600); err != nil {
		return err
	}
	s.block = fmt.Sprintf(`  HostName 127.0.0.1
  Port %d
  User %s
  HostKeyAlias direct
  UserKnownHostsFile %s
  GlobalKnownHostsFile none
  StrictHostKeyChecking yes
  IdentityFile %s
  IdentitiesOnly yes
`, port, who.Username, known, filepath.Join(s.dir, "user"))
	s.Path, err = s.via("direct", "")
	s.Path.Dir = data
	return err
}

// via writes another client configuration to the same server.
func (s *SSHD) via(name, option string) (Path, error) {
	p := Path{Name: name, Config: filepath.Join(s.dir, name+".config"), Host: name, Dir: s.Path.Dir}
	text := "Host direct\n" + s.block
	if name != "direct" {
		text += "Host " + name + "\n" + s.block + "  " + option + "\n"
	}
	return p, os.WriteFile(p.Config, []byte(text), 0o600)
}

// Jump returns the path through OpenSSH's own jump host, the server being its own.
func (s *SSHD) Jump() (Path, error) {
	// Not ProxyJump: the inner ssh would not take the cipher from the command line.
	inner := fmt.Sprintf("ProxyCommand ssh -F %s -o BatchMode=yes -o Ciphers=%s -W %s direct", s.Path.Config, Cipher, s.address)
	return s.via("jump", inner)
}

// Relayed returns the path through two socat relays, with socat as ProxyCommand: as many hops as Carrel has, none of
// which knows who may pass. The relays run until stop.
func (s *SSHD) Relayed(ctx context.Context) (p Path, stop func(), err error) {
	if _, err := exec.LookPath("socat"); err != nil {
		return Path{}, nil, fmt.Errorf("no socat on this machine, which is one of the peers: apt-get install socat")
	}
	var relays []*Process
	stop = func() {
		for _, r := range relays {
			_ = r.Stop() // a relay that had to be killed is gone all the same
		}
	}
	to := s.address
	for i := range 2 {
		port, err := FreePort()
		if err != nil {
			stop()
			return Path{}, nil, err
		}
		listen := fmt.Sprintf("TCP-LISTEN:%d,bind=127.0.0.1,reuseaddr,fork,nodelay", port)
		r, err := Start("socat", filepath.Join(s.dir, "socat.log"), nil, "socat", listen, "TCP:"+to+",nodelay")
		if err != nil {
			stop()
			return Path{}, nil, err
		}
		relays = append(relays, r)
		to = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
		if err := r.WaitTCP(ctx, to, sshdReady); err != nil {
			stop()
			return Path{}, nil, fmt.Errorf("relay %d: %w", i+1, err)
		}
	}
	p, err = s.via("relayed", "ProxyCommand socat - TCP:"+to+",nodelay")
	if err != nil {
		stop()
	}
	return p, stop, err
}

// Shared returns the path whose first connection carries all later ones as channels.
func (s *SSHD) Shared() (Path, error) {
	return s.via("shared", fmt.Sprintf("ControlMaster auto\n  ControlPath %s/%%C\n  ControlPersist no", s.dir))
}
