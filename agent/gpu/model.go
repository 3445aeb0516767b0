package gpu

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// ModelKey is the short name that people type for a model: "4090", "A100-80GB", "RTX6000-Ada".
//
// The rule: brand words and packaging (NVIDIA, Tesla, GeForce, RTX or GTX before a number, SXM4, PCIe, HBM3, ...) go, the
// rest is joined ("3080 Ti" is "3080Ti", other words by '-'). Families sold in several memory sizes carry the size: always
// where no size is the usual one (A100, V100, P100), else only when it is another than the usual (H100 is the one with
// 80 GB, "H100-94GB" the NVL). The size is the name's or else memoryMiB, rounded to a whole GiB.
func ModelKey(name string, memoryMiB int64) string {
	size := memorySize(name, memoryMiB)
	words := modelWords(name)
	if len(words) == 0 {
		return "unknown"
	}
	key := strings.Join(words, "-")
	usual, several := usualSize()[key]
	if several && size > 0 && size != usual {
		return fmt.Sprintf("%s-%dGB", key, size)
	}
	return key
}

// InstanceKey is the model key of a MIG instance of the given profile: "A100-80GB/1g.10gb".
func InstanceKey(parentKey, profile string) string { return parentKey + "/" + profile }

// usualSize holds the families sold in several sizes, with the size in GB that needs no mention (0: each is mentioned).
// Source: NVIDIA's product pages and https://developer.nvidia.com/cuda-gpus.
func usualSize() map[string]int64 {
	return map[string]int64{
		"A100": 0, "V100": 0, "P100": 0, "GH200": 0, "A800": 0,
		"H100": 80, "H800": 80, "H20": 96, "K80": 12,
		"1060": 6, "2060": 6, "3050": 8, "3060": 12, "3080": 10, "4060Ti": 8, "5060Ti": 16,
	}
}

var (
	sizePattern = regexp.MustCompile(`(?i)\b(\d+)\s?GB\b`)
	dropPattern = regexp.MustCompile(`(?i)^(nvidia|tesla|geforce|quadro|mock|graphics|device|gpu|generation|edition|` +
		`pcie|sxm\d?|mxm|hbm\d?e?|\d+gb|gb|fhhl|ts\d?|nvl)$`)
)

func memorySize(name string, memoryMiB int64) int64 {
	if m := sizePattern.FindStringSubmatch(name); m != nil {
		var n int64
		if _, err := fmt.Sscan(m[1], &n); err == nil {
			return n
		}
	}
	return (memoryMiB + 512) / 1024
}

// modelWords returns the words of a driver's device name that tell models apart.
func modelWords(name string) []string {
	name = sizePattern.ReplaceAllString(name, " ")
	var words []string
	for _, w := range strings.FieldsFunc(name, func(r rune) bool { return r == ' ' || r == '-' || r == '_' || r == '/' }) {
		if dropPattern.MatchString(w) {
			continue
		}
		words = append(words, w)
	}
	return joinBrand(words)
}

// joinBrand joins what belongs together: "RTX A6000" is A6000, "RTX 4090" is 4090, "RTX 6000 Ada" is RTX6000-Ada (the
// professional cards' numbers need their brand), "3080 Ti" is 3080Ti, "4070 SUPER" is 4070Super, "4090 D" is 4090D.
func joinBrand(words []string) []string {
	if len(words) > 2 && strings.EqualFold(words[0], "RTX") && strings.EqualFold(words[1], "PRO") {
		words = append([]string{"RTXPRO" + words[2]}, words[3:]...)
	} else if len(words) > 1 && (strings.EqualFold(words[0], "RTX") || strings.EqualFold(words[0], "GTX")) {
		if professional(words[1]) {
			words = append([]string{"RTX" + words[1]}, words[2:]...)
		} else {
			words = words[1:]
		}
	}
	suffix := map[string]string{"ti": "Ti", "super": "Super", "d": "D", "max": "Max"}
	for len(words) > 1 {
		s, ok := suffix[strings.ToLower(words[1])]
		if !ok {
			break
		}
		words = append([]string{words[0] + s}, words[2:]...)
	}
	return words
}

// professional reports whether "RTX n" is a workstation card (RTX 4000, 5000, 6000, 8000) and no GeForce.
func professional(number string) bool {
	return slices.Contains([]string{"2000", "3000", "4000", "4500", "5000", "6000", "8000"}, number)
}

// knownModel is a model that the simulated source can stand for.
type knownModel struct {
	key        string
	name       string
	memoryMiB  int64
	capability string
	idleW      float64
	loadW      float64
}

// knownModels is what the simulated source knows. Compute capability: https://developer.nvidia.com/cuda-gpus. Memory: what
// nvidia-smi reports for the model; where reports differ by board, one of them. Power: a rounded idle figure, and the board
// limit of NVIDIA's data sheet.
func knownModels() []knownModel {
	return []knownModel{
		{"1080Ti", "NVIDIA GeForce GTX 1080 Ti", 11264, "6.1", 10, 250},
		{"2080Ti", "NVIDIA GeForce RTX 2080 Ti", 11264, "7.5", 12, 250},
		{"3080", "NVIDIA GeForce RTX 3080", 10240, "8.6", 15, 320},
		{"3090", "NVIDIA GeForce RTX 3090", 24576, "8.6", 20, 350},
		{"4070", "NVIDIA GeForce RTX 4070", 12282, "8.9", 10, 200},
		{"4080", "NVIDIA GeForce RTX 4080", 16376, "8.9", 13, 320},
		{"4090", "NVIDIA GeForce RTX 4090", 24564, "8.9", 18, 450},
		{"5090", "NVIDIA GeForce RTX 5090", 32607, "12.0", 20, 575},
		{"A6000", "NVIDIA RTX A6000", 49140, "8.6", 20, 300},
		{"RTX6000-Ada", "NVIDIA RTX 6000 Ada Generation", 49140, "8.9", 20, 300},
		{"T4", "Tesla T4", 15360, "7.5", 10, 70},
		{"L4", "NVIDIA L4", 23034, "8.9", 13, 72},
		{"L40S", "NVIDIA L40S", 46068, "8.9", 35, 350},
		{"A10", "NVIDIA A10", 23028, "8.6", 15, 150},
		{"A30", "NVIDIA A30", 24576, "8.0", 30, 165},
		{"A40", "NVIDIA A40", 46068, "8.6", 30, 300},
		{"V100-16GB", "Tesla V100-SXM2-16GB", 16384, "7.0", 40, 300},
		{"V100-32GB", "Tesla V100-SXM2-32GB", 32768, "7.0", 40, 300},
		{"A100-40GB", "NVIDIA A100-SXM4-40GB", 40960, "8.0", 50, 400},
		{"A100-80GB", "NVIDIA A100-SXM4-80GB", 81920, "8.0", 60, 400},
		{"H100", "NVIDIA H100 80GB HBM3", 81559, "9.0", 70, 700},
		{"H200", "NVIDIA H200", 143771, "9.0", 75, 700},
		{"B200", "NVIDIA B200", 183359, "10.0", 140, 1000},
	}
}

// KnownModels returns the keys that a simulated list may name.
func KnownModels() []string {
	var keys []string
	for _, m := range knownModels() {
		keys = append(keys, m.key)
	}
	return keys
}
