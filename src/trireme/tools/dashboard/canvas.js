// A chart of ECharts that reports when it comes into view ("seen"), which stretch of its horizontal axis was dragged over
// ("stretch"), and a double-click ("whole"). It may be removed at any moment, also before it was drawn.
import { echarts } from "nicegui-echart";
import { convertDynamicProperties } from "../../static/utils/dynamic_properties.js";

const AROUND = "300px"; // around the window: charts within it are drawn before they are seen
const NO_ICON = { zoom: "path://", back: "path://" };
const TOOLS = { feature: { dataZoom: { yAxisIndex: "none", filterMode: "none", icon: NO_ICON } } }; // selects by dragging; its buttons are hidden
const SELECT = { type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true };

// Turn texts under keys such as ":formatter" into functions. Data have none, and are too long to be searched.
function withFunctions(value) {
  if (Array.isArray(value)) return value.map(withFunctions);
  if (typeof value !== "object" || value === null) return value;
  const copy = {};
  for (const [name, part] of Object.entries(value)) copy[name] = name === "data" ? part : withFunctions(part);
  convertDynamicProperties(copy, false);
  return copy;
}

export default {
  template: "<div></div>",
  props: { options: Object, chooses: Boolean },
  mounted() {
    this.sight = new IntersectionObserver((entries) => this.see(entries.at(-1).isIntersecting), { rootMargin: AROUND });
    this.sight.observe(this.$el);
    this.size = new ResizeObserver(() => this.chart?.resize());
    this.size.observe(this.$el);
    this.draw();
  },
  beforeUnmount() {
    this.sight.disconnect();
    this.size.disconnect();
    this.chart?.dispose();
  },
  watch: {
    options() {
      this.draw();
    },
  },
  methods: {
    see(isSeen) {
      if (isSeen !== this.isSeen) {
        this.isSeen = isSeen;
        this.$emit("seen", isSeen);
      }
    },
    draw() {
      if (!this.options?.series) return;
      if (!this.chart) {
        this.chart = echarts.init(this.$el);
        this.chart.getZr().on("dblclick", () => this.$emit("whole"));
        this.chart.on("datazoom", ({ batch }) => this.$emit("stretch", [batch[0].startValue, batch[0].endValue]));
      }
      const options = withFunctions(this.options);
      this.chart.setOption(this.chooses ? { ...options, toolbox: TOOLS } : options, { notMerge: true });
      if (this.chooses) this.chart.dispatchAction(SELECT);
    },
  },
};
