package auth

import (
	"crypto/rsa"
	"strings"

	"golang.org/x/crypto/ssh"

	"github.com/carrel-dev/carrel/services/fleet"
)

// leastRSABits is what NIST SP 800-57 part 1 gives for 128 bits of strength.
const leastRSABits = 3072

// ParseDeviceKey checks an SSH public key and returns it without options and comment, with its SHA-256 fingerprint. KindInvalid.
func ParseDeviceKey(text string) (authorized, fingerprint string, err error) {
	key, _, options, rest, err := ssh.ParseAuthorizedKey([]byte(text))
	if err != nil {
		return "", "", fleet.Errorf(fleet.KindInvalid, "this is not an SSH public key; give the one line of a .pub file")
	}
	if len(options) > 0 || len(strings.TrimSpace(string(rest))) > 0 {
		return "", "", fleet.Errorf(fleet.KindInvalid, "give one SSH public key without options")
	}
	switch key.Type() {
	case ssh.KeyAlgoED25519, ssh.KeyAlgoECDSA256, ssh.KeyAlgoECDSA384, ssh.KeyAlgoECDSA521, ssh.KeyAlgoSKED25519, ssh.KeyAlgoSKECDSA256:
	case ssh.KeyAlgoRSA:
		crypto, ok := key.(ssh.CryptoPublicKey)
		if !ok {
			return "", "", fleet.Errorf(fleet.KindInvalid, "this RSA key cannot be read; make one with `ssh-keygen -t ed25519`")
		}
		if public, ok := crypto.CryptoPublicKey().(*rsa.PublicKey); !ok || public.N.BitLen() < leastRSABits {
			return "", "", fleet.Errorf(fleet.KindInvalid, "an RSA key needs %d bits or more; make one with `ssh-keygen -t ed25519`", leastRSABits)
		}
	default:
		return "", "", fleet.Errorf(fleet.KindInvalid, "keys of type %s are not taken; make one with `ssh-keygen -t ed25519`", key.Type())
	}
	return strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key))), ssh.FingerprintSHA256(key), nil
}
